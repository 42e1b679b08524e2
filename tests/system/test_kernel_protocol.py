# SPDX-License-Identifier: MIT
# ruff: noqa: RUF012 (the interface of jupyter_kernel_test)
"""jupyter_kernel_test, whole, against the installed kernelspec."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import jupyter_kernel_test
import pytest
from overmind.kernel import kernelspec


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """The kernelspec in a folder of this test's own, and a fresh IPython profile: history starts empty."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", folder)
        patch.setenv("IPYTHONDIR", str(Path(folder, "ipython")))
        patch.setenv("OVERMIND_ZYGOTE", "0")
        kernelspec.install(user=True)
        yield


class KernelTests(jupyter_kernel_test.KernelTests):
    kernel_name = kernelspec.NAME
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


del jupyter_kernel_test  # else pytest collects its abstract class, too
