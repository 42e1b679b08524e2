# SPDX-License-Identifier: MIT
"""Cells for a kernel, and what two kernels' answers to a cell must have in common.

Compared are types, order and contents of what iopub carries, and the reply with its metadata's keys. Not compared: ids,
times, addresses, and how a stream is cut into messages.
"""

from __future__ import annotations

import re
from typing import Any

from kernel_sessions import Session

CELLS = {
    "expression": "1 + 1",
    "nothing": "",
    "comment": "# nothing to do",
    "semicolon": "1 + 1;",
    "none": "None",
    "print": "print('out')",
    "both streams": "import sys\nprint('out')\nprint('err', file=sys.stderr)",
    "print and value": "print('before')\n'value'",
    "unicode": "print('\\u00e9\\u4e2d\\U0001f600', end='')\n'\\u00e9'",
    "control characters": "print('\\x00\\x07\\x1b[31mred\\x1b[0m\\ttab\\r\\n\"quoted\\\\')",
    "error": "1 / 0",
    "error after output": "print('before')\nraise ValueError('no')",
    "chained error": "try:\n    1/0\nexcept Exception as e:\n    raise KeyError('k') from e",
    "error in function": "def f():\n    return [][1]\nf()",
    "syntax error": "def f(:\n  pass",
    "indentation error": "  x = 1\n y = 2",
    "name error": "no_such_name",
    "system exit": "raise SystemExit(3)",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "base exception": "class B(BaseException): pass\nraise B('base')",
    "exception group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "rich": "class R:\n def _repr_html_(self): return '<b>1</b>'\n def _repr_markdown_(self): return '*1*'\n"
    " def __repr__(self): return 'R'\nR()",
    "mimebundle": "class M:\n def _repr_mimebundle_(self, include=None, exclude=None):\n"
    "  return {'application/json': {'b': 1, 'a': [True, None]}, 'text/plain': 'm'}, {'text/plain': {'x': 1}}\nM()",
    "failing repr": "class F:\n def __repr__(self): raise RuntimeError('repr')\nF()",
    "failing html": "class G:\n def _repr_html_(self): raise RuntimeError('html')\nG()",
    "image": "from IPython.display import Image\nImage(data=b'\\x89PNG\\r\\n\\x1a\\n' + b'0' * 30)",
    "svg": "from IPython.display import SVG\nSVG('<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>')",
    "display": "from IPython.display import display, HTML\ndisplay(HTML('<i>x</i>'), 1, 'two', metadata={'m': 1})",
    "display_id": "h = display(1, display_id='fixed')\nh.update(2)\ndisplay(3, display_id='fixed', update=True)",
    "own display_id": "h = display('x', display_id=True)\nh.update('y')\nh",
    "raw display": "display({'text/plain': 'raw'}, raw=True)",
    "clear_output": "from IPython.display import clear_output as c\nprint(1)\nc(wait=True)\nprint(2)\nc()",
    "order": "print('a')\ndisplay('b')\nprint('c')\n'd'",
    "progress": "for i in range(3):\n    print(i, end='\\r', flush=True)",
    "json": "from IPython.display import JSON\nJSON({'z': 1, 'a': {'y': [1, 2.5, None], 'b': float('1e300')}})",
    "javascript": "from IPython.display import Javascript\nJavascript('1')",
    "await": "import asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')\n5",
    "await error": "await asyncio.sleep(0)\nraise ValueError('async')",
    "async for": "async def gen():\n    yield 1\nasync for x in gen():\n    print(x)",
    "magic": "%precision 3",
    "unknown magic": "%no_such_magic",
    "timeit": "%%capture out\nprint('captured')",
    "captured": "out.show()",
    "bash": "%%bash\necho from bash\necho to err >&2",
    "bash fails": "%%bash\nexit 3",
    "shell": "!echo from shell",
    "shell capture": "x = !echo one; echo two\nx",
    "writefile": "%%writefile /dev/null\ntext",
    "help": "len?",
    "source": "import textwrap\ntextwrap.dedent??",
    "page": "%pinfo str.join",
    "set_next_input": "get_ipython().set_next_input('next')",
    "load": "%load_ext no_such_extension",
    "user warning": "import warnings\nwarnings.warn('careful')",
    "logging": "import logging\nlogging.getLogger('x').warning('logged')",
    "traceback printed": "import traceback\ntry:\n    1/0\nexcept Exception:\n    traceback.print_exc()",
    "execution count": "In[-1], Out.get(1), _i",
    "underscore": "_",
    "matplotlib": "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.figure(figsize=(1, 1))\nplt.plot([1]);",
    "matplotlib show": "plt.figure(figsize=(1, 1), dpi=10)\nplt.show()\nprint('after')",
    "autoawait off": "%autoawait",
    "gui asyncio": "%gui asyncio",
    "no output": "x = 5",
    "reset": "%reset -f",
    "who": "x = 1\n%who",
    "writelines": "import sys\nsys.stdout.writelines(['a\\n', 'b\\n'])",
    "stdout attributes": "sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.writable()",
    "shell class": "type(get_ipython()).__name__, 'IPKernelApp' in get_ipython().config",
    "running loop": "import asyncio\nasyncio.get_running_loop().is_running()",
    "asyncio.run": "asyncio.run(asyncio.sleep(0))",
    "file": "import inspect\ninspect.currentframe().f_code.co_filename",
    "sys.path": "import sys\n[p for p in sys.path if not p or 'kernel' in p]",
    "pickle": "import pickle\nclass P:\n    x = 1\ntype(pickle.loads(pickle.dumps(P()))) is P",
    "main": "import __main__\n__main__.P is P, __main__.__dict__ is globals(), __name__",
    "place": "import os\nget_ipython().starting_dir == os.getcwd() == _dh[0]",
    "environment": "import os\n[os.environ.get(k) for k in ('TERM', 'PAGER', 'GIT_PAGER', 'MPLBACKEND')]",
}

_UNLIKE = [
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "0xADDRESS"),
    (re.compile(r"ipykernel_\d+"), "ipykernel_PID"),
    (re.compile(r"display_id=[0-9a-f]{32}"), "display_id=ID"),
    (re.compile(r"\nTip: .*", re.DOTALL), ""),
]


def alike(value: Any) -> Any:
    """Without what two kernels can't share."""
    if isinstance(value, str):
        for pattern, name in _UNLIKE:
            value = pattern.sub(name, value)
        return value
    if isinstance(value, dict):
        hidden = {"engine_uuid", "display_id"} if len(str(value.get("display_id", ""))) == 32 else {"engine_uuid"}
        return {key: "ID" if key in hidden else alike(item) for key, item in value.items()}
    if isinstance(value, list):
        return [alike(item) for item in value]
    return value


def joined(outputs: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Types and contents. Streams are joined between two other messages, stdout before stderr: ipykernel keeps no
    order between the two."""
    found: list[tuple[str, Any]] = []
    streams = {"stdout": "", "stderr": ""}

    def flush() -> None:
        for name, text in streams.items():
            if text:
                found.append(("stream", {"name": name, "text": alike(text)}))
            streams[name] = ""

    for message in outputs:
        content = message["content"]
        if message["msg_type"] == "stream":
            streams[content["name"]] += content["text"]
        else:
            flush()
            found.append((message["msg_type"], alike(content)))
    flush()
    return found


def answer(session: Session, code: str, **options: Any) -> tuple[Any, Any, Any]:
    msg_id = session.send(code, **options)
    outputs = session.outputs(msg_id)
    reply = session.reply(msg_id)
    return joined(outputs), alike(reply["content"]), sorted(reply["metadata"])
