# SPDX-License-Identifier: MIT
# ruff: noqa: RUF012 (the interface of jupyter_kernel_test)
"""What jupyter_kernel_test asks a Python kernel, and what it expects."""

from __future__ import annotations


class Samples:
    """To be a base of a jupyter_kernel_test.KernelTests, before it."""

    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [{"text": "zi", "matches": {"zip"}}, {"text": "'a'.isal", "matches": {"isalnum", "isalpha"}}]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('no')"
    code_execute_result = [
        {"code": "1+1", "result": "2"},
        {"code": "class R:\n def _repr_html_(self): return '<b>r</b>'\nR()", "result": "<b>r</b>", "mime": "text/html"},
    ]
    code_display_data = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math(r'\\frac{1}{2}'))", "mime": "text/latex"},
    ]
    code_history_pattern = "1?1*"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
