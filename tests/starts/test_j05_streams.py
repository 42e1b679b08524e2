# SPDX-License-Identifier: MIT
"""J05: every cell gives the same messages in a kernel that comes from a zygote and in a plain start of that kernel."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import own_runtime
from kernel_messages import CELLS, answer
from kernel_sessions import Session, session, text_of
from overmind.kernel import kernelspec
from starts import ENGINES, forked_session, warm_kernel, zygotes

LEARNED = "import ctypes, ipywidgets, multiprocessing, tqdm.auto, matplotlib.pyplot as plt\nplt.plot([1]);"

# What imports do with the shell and the kernel that they find, in a kernel where nothing was imported yet.
FIRST = {
    "out of sight": "import sys\n[name for name in ('ipywidgets', 'matplotlib', 'tqdm') if name in sys.modules]",
    "no targets": "import comm\nsorted(comm.get_comm_manager().targets)",
    "no magic": "import matplotlib.pyplot as plt\nplt.figure(figsize=(1, 1), dpi=10)\nplt.plot([1]);",
    "callbacks": "[len(each) for each in get_ipython().events.callbacks.values()][:2]",
    "targets": "import ipywidgets\nsorted(comm.get_comm_manager().targets)",
    "shell": "import IPython\nIPython.get_ipython() is get_ipython() is IPython.core.interactiveshell."
    "InteractiveShell.instance()",
}

MORE = {
    "burst": "for i in range(2000):\n    print('%099d' % i)",
    "thread": "import threading\nt = threading.Thread(target=print, args=['from a thread'])\nt.start()\nt.join()",
    "tqdm": "from tqdm import tqdm\nfor i in tqdm(range(3), bar_format='{n_fmt}/{total_fmt}'):\n    pass",
    "tqdm of notebooks": "from tqdm.auto import tqdm\n"
    "for i in tqdm(range(3), bar_format='{n_fmt}/{total_fmt}'):\n    pass",
    "slider": "from ipywidgets import IntSlider\ns = IntSlider(3)\ndisplay(s)",
    "slider moves": "s.value = 5",
    "slider closes": "s.close()",
    "output widget": "from ipywidgets import Output\no = Output()\nwith o:\n    print('inside')\ndisplay(o)",
    "figure": "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.figure(figsize=(1, 1))\nplt.plot([1, 2]);",
    "tasks": "import asyncio\nasync def f(i):\n    await asyncio.sleep(0.01 * i)\n    print(i)\n"
    "await asyncio.gather(*map(f, range(3)))",
    "logged": "import logging\nlogging.basicConfig(level=logging.INFO)\nlogging.getLogger('x').info('said')",
    "no input": "input('prompt')",
    "exit hook": "import atexit\natexit.register(print, 'at the end')\nNone",
}

# What goes past the kernel's Python, and its text: ipykernel reads it on a thread, some of it after the cell has ended.
RAW = {
    "os.system": ("import os\nos.system('echo from system')", "from system\n"),
    "inherited": ("import subprocess\nsubprocess.run(['echo', 'inherited']).returncode", "inherited\n"),
    "descriptor": ("import os\nos.write(1, b'raw\\n')", "raw\n"),
    "printf": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.printf(b'from C %d\\n', 42)\nlibc.fflush(None)",
        "from C 42\n",
    ),
    "burst of bytes": ("import os\nos.system(\"head -c 200000 /dev/zero | tr '\\\\0' x\")", "x" * 200000),
    "fork": (
        "import os, sys\npid = os.fork()\nif pid == 0:\n    print('from a child')\n    sys.stdout.flush()\n"
        "    os._exit(0)\nos.waitpid(pid, 0)[1]",
        "from a child\n",
    ),
    "pool": (
        # One write: ipykernel may take two of another process in the wrong order.
        "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    pool.apply(print, ['a\\nbb\\n'], {'end': ''})",
        "a\nbb\n",
    ),
}

# Ids of comms and of widgets; ids of requests, which the Output widget tells.
_RANDOM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{24}_\d+_\d+")


def _settled(value: Any) -> Any:
    """The same without ids that are drawn by lot."""
    if isinstance(value, str):
        return _RANDOM.sub("ID", value)
    if isinstance(value, dict):
        return {_settled(key): _settled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_settled(item) for item in value]
    return value


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Session]]:
    """A plain start and a fork, both at the beginning of their sessions."""
    with own_runtime() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        patch.setenv("PYTHONWARNINGS", "default")
        warm_kernel(runtime, tmp_path_factory.mktemp("specs"), LEARNED, request.param)
        with session(kernelspec.argv(request.param)) as plain, forked_session(runtime, request.param) as forked:
            yield [plain, forked]


def _strays(running: Session) -> list[Any]:
    """Messages that belong to no cell; a client's own question whether the kernel is ready is answered, too."""
    found = [each for each in running.strays if each["parent_header"].get("msg_type") != "kernel_info_request"]
    running.strays.clear()
    return [(each["msg_type"], each["content"]) for each in found]


# It leaves a coroutine behind, of which Python complains whenever it comes to collect it.
_ANY_TIME = "asyncio.run"


@pytest.mark.parametrize("name", [name for name in (*FIRST, *CELLS, *MORE) if name != _ANY_TIME])
def test_cell(pair: list[Session], name: str) -> None:
    code = {**FIRST, **CELLS, **MORE}[name]
    plain, forked = ((answer(each, code, allow_stdin=False), _strays(each)) for each in pair)
    assert _settled(forked) == _settled(plain)


def _until(running: Session, msg_id: str, size: int) -> list[dict[str, Any]]:
    """All messages of a cell that prints so many characters, some of them perhaps late."""
    found: list[dict[str, Any]] = []

    def complete(message: dict[str, Any]) -> bool:
        found.append(message)
        return any(each["content"].get("execution_state") == "idle" for each in found) and len(text_of(found)) >= size

    running.outputs(msg_id, complete)
    return found


@pytest.mark.parametrize("name", RAW)
def test_raw_output(pair: list[Session], name: str) -> None:
    code, text = RAW[name]
    found = []
    for running in pair:
        msg_id = running.send(code)
        outputs = _until(running, msg_id, len(text))
        assert text_of(outputs) == text
        found.append([(each["msg_type"], each["content"]) for each in outputs if each["msg_type"] != "stream"])
        running.reply(msg_id)
        assert not _strays(running)
    assert found[1] == found[0]


@pytest.mark.parametrize(
    "code", ["input('name? ')", "import getpass\ngetpass.getpass('secret? ')", "input() + input()"]
)
def test_input(pair: list[Session], code: str) -> None:
    found = []
    for running in pair:
        asked = []
        msg_id = running.send(code, allow_stdin=True)
        for reply in ["one", "two"][: max(1, code.count("input()"))]:
            question = running.client.get_stdin_msg(timeout=30)
            assert question["parent_header"]["msg_id"] == msg_id
            asked.append(question["content"])
            running.client.input(reply)
        outputs = [(each["msg_type"], each["content"]) for each in running.outputs(msg_id)]
        found.append(
            (asked, [each for each in outputs if each[0] != "execute_input"], running.reply(msg_id)["content"])
        )
    plain, forked = found
    forked[2].pop("engine_info", None), plain[2].pop("engine_info", None)
    assert forked == plain


@pytest.mark.parametrize("engine", ENGINES)
def test_two_at_once(runtime: Path, folder: Path, engine: str) -> None:
    """What one prints, in whatever way, is not seen by the other."""
    code = """
import ctypes, os, subprocess
libc = ctypes.CDLL(None)
for i in range(20):
    print("{0} printed", i)
    os.system("echo {0} system %d" % i)
    libc.printf(b"{0} C %d\\n", i)
    libc.fflush(None)
    subprocess.run(["echo", "{0} child %d" % i])
"""
    warm_kernel(runtime, folder, "import ctypes, subprocess", engine)
    with forked_session(runtime, engine) as one, forked_session(runtime, engine) as other:
        assert len(zygotes(runtime)) == 1
        right: list[str] = []

        def run(name: str, running: Session) -> None:
            expected = sorted(f"{name} {how} {i}" for i in range(20) for how in ("printed", "system", "C", "child"))
            outputs = _until(running, running.send(code.replace("{0}", name)), len("\n".join(expected)) + 1)
            if sorted(text_of(outputs).splitlines()) == expected:
                right.append(name)

        threads = [threading.Thread(target=run, args=each) for each in (("one", one), ("other", other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(right) == ["one", "other"]
        assert _strays(one) == _strays(other) == []
