# SPDX-License-Identifier: MIT
"""A notebook in VS Code: start, hidden cells, cells, interrupt, debugger, and a restart that is a fork of a zygote."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest
from conftest import wait_for
from overmind.kernel import kernelspec
from starts import WARM_SECONDS, caught_up, plain_starts
from vscode_kernel import Message, RawKernel

WIDGETS = """
try:
    import ipywidgets as _hidden_widgets
    print("version of ipywidgets: " + _hidden_widgets.__version__)
    del _hidden_widgets
except:
    pass
"""

# One cell of what the extension does at the start: a module for its chat, made by hand; the notebook's file; completion
# without jedi; matplotlib with its defaults kept aside, in a block that may fail.
START = """
def _hidden_inject():
    import sys as _hidden_sys
    import IPython as _hidden_ipython
    made = type(_hidden_ipython)("vscode")
    made.chat = type(_hidden_ipython)("chat")
    _hidden_sys.modules["vscode"] = made
    del _hidden_sys, _hidden_ipython

_hidden_inject()
del _hidden_inject

__vsc_ipynb_file__ = "/somewhere/a notebook.ipynb"
%config Completer.use_jedi = False
try:
    import matplotlib
    %matplotlib inline
    _hidden_parameters = dict(matplotlib.rcParams)
    matplotlib.style.use('dark_background')
except:
    print("matplotlib may be missing")
"""

CHDIR = """
import os as _hidden_os
try:
    _hidden_os.chdir({folder!r})
except:
    pass
del _hidden_os
"""


@pytest.fixture
def launch(runtime: Path, folder: Path) -> Iterator[Callable[[], RawKernel]]:
    """Starts a kernel of the kernelspec, each time with another window's variables."""
    windows = count(1)

    def start() -> RawKernel:
        window = next(windows)
        env = {**os.environ, "VSCODE_PID": str(window), "VSCODE_IPC_HOOK": f"/run/{window}.sock"}
        return RawKernel(kernelspec.argv(), folder, env)

    yield start
    wait_for(lambda: not [each for each in psutil.process_iter() if _is_of(each, folder)], 20, "all kernels have ended")


def _is_of(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    return False


def hidden(kernel: RawKernel, code: str) -> str:
    """What a hidden cell printed. It must not fail."""
    reply, outputs = kernel.execute(code, store_history=False)
    assert reply["status"] == "ok", reply
    return "".join(each["content"]["text"] for each in outputs if each["msg_type"] == "stream")


def open_notebook(kernel: RawKernel, folder: Path) -> None:
    """All that happens until the user's first cell may run."""
    info = kernel.start()
    assert info["status"] == "ok" and info["language_info"]["name"] == "python"
    assert "version of ipywidgets: 8." in hidden(kernel, WIDGETS)
    assert hidden(kernel, START) == ""
    assert hidden(kernel, CHDIR.format(folder=str(folder))) == ""
    assert kernel.request("shell", "kernel_info_request", {})["status"] == "ok"
    reply, outputs = kernel.execute("import sys; sys.modules['vscode'].chat; 6 * 7")
    assert (reply["status"], reply["execution_count"]) == ("ok", 1), reply
    (result,) = outputs
    assert result["content"]["data"] == {"text/plain": "42"} and result["content"]["execution_count"] == 1


def use(kernel: RawKernel) -> None:
    """A plot, a question, an error and the cell queued behind it, completion."""
    _, outputs = kernel.execute("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
    assert [sorted(each["content"]["data"]) for each in outputs] == [["image/png", "text/plain"]]
    sent = kernel.begin("print('hello', input('name? '))")
    prompt = kernel.wait("stdin", lambda _: True, "the question")
    assert prompt["content"] == {"prompt": "name? ", "password": False}
    kernel.answer(prompt, "world")
    _, outputs = kernel.finish(sent)
    assert [each["content"]["text"] for each in outputs] == ["hello world\n"]
    first, second = kernel.begin("1 / 0"), kernel.begin("'goes on'")  # stop_on_error is false
    reply, outputs = kernel.finish(first)
    assert reply["ename"] == "ZeroDivisionError" and [each["msg_type"] for each in outputs] == ["error"]
    assert "\x1b[" in "".join(outputs[0]["content"]["traceback"])
    reply, outputs = kernel.finish(second)
    assert reply["status"] == "ok" and outputs[0]["content"]["data"] == {"text/plain": "'goes on'"}
    found = kernel.request("shell", "complete_request", {"code": "plt.plo", "cursor_pos": 7})
    completed = {f"{'plt.plo'[: found['cursor_start']]}{match}" for match in found["matches"]}
    assert "plt.plot" in completed and found["cursor_end"] == 7


def interrupts(kernel: RawKernel) -> None:
    """One cell that waits in Python, one that waits for a program."""
    for cell in (
        "import time; print('on'); time.sleep(300)",
        "import subprocess; subprocess.run(['sh', '-c', 'echo on; sleep 300'])",
    ):
        sent = kernel.begin(cell)
        kernel.wait("iopub", lambda message: message["msg_type"] == "stream", f"{cell} runs")
        kernel.interrupt()
        reply, outputs = kernel.finish(sent)
        assert reply["status"] == "error" and reply["ename"] == "KeyboardInterrupt", reply
        assert outputs[-1]["msg_type"] == "error"
        assert kernel.execute("1")[0]["status"] == "ok"
    # Nothing runs: nothing happens. The launcher passes it on when it gets to it, which may be in the next cell.
    kernel.interrupt()
    wait_for(lambda: kernel.execute("1")[0]["status"] == "ok", 20, "the kernel goes on")


_sequence = count(1)


def debug(kernel: RawKernel, command: str, arguments: Message | None = None) -> Message:
    request = {"type": "request", "seq": next(_sequence), "command": command, "arguments": arguments or {}}
    reply = kernel.request("control", "debug_request", request)
    assert reply["success"], reply
    return reply


def debugs(kernel: RawKernel) -> None:
    """A cell stops at a breakpoint and goes on."""
    assert hidden(kernel, "import builtins\nimport ipykernel\nbuiltins.print(ipykernel.__version__)")[0].isdigit()
    supported = debug(kernel, "initialize", {"clientID": "vscode", "adapterID": "", "pathFormat": "path"})["body"]
    assert supported["supportsConfigurationDoneRequest"]
    debug(kernel, "attach", {"justMyCode": True})
    code = "value = 41\nvalue += 1\nvalue"
    path = debug(kernel, "dumpCell", {"code": code})["body"]["sourcePath"]
    debug(kernel, "setBreakpoints", {"source": {"path": path}, "breakpoints": [{"line": 2}], "sourceModified": False})
    debug(kernel, "configurationDone")
    sent = kernel.begin(code)
    stopped = kernel.wait("iopub", lambda got: got["content"].get("event") == "stopped", "the breakpoint")["content"]
    debug(kernel, "continue", {"threadId": stopped["body"]["threadId"]})
    reply, outputs = kernel.finish(sent)
    results = [each["content"]["data"] for each in outputs if each["msg_type"] == "execute_result"]
    assert reply["status"] == "ok" and results == [{"text/plain": "42"}]
    debug(kernel, "disconnect", {"restart": False, "terminateDebuggee": False})


def test_a_notebook_and_its_restart(runtime: Path, folder: Path, launch: Callable[[], RawKernel]) -> None:
    with launch() as first:
        open_notebook(first, folder)
        assert first.process.pid == int(hidden(first, "import os; print(os.getpid())")), "the first is a plain start"
        use(first)
        debugs(first)
        interrupts(first)
        wait_for(lambda: caught_up(runtime), WARM_SECONDS, "a zygote has all imports")
        plain = plain_starts(runtime)
        first.dispose()
        with launch() as second:  # at once: the first may be there still
            open_notebook(second, folder)
            assert plain_starts(runtime) == plain, "the restart was a plain start"
            pid = int(hidden(second, "import os; print(os.getpid())"))
            assert pid != second.process.pid
            use(second)
            debugs(second)
            interrupts(second)
        wait_for(lambda: not psutil.pid_exists(pid), 20, "the kernel ends with its launcher")
    assert first.process.returncode is not None


def test_a_restart_in_the_middle_of_a_cell(runtime: Path, folder: Path, launch: Callable[[], RawKernel]) -> None:
    """Neither the kernel nor what its cell started is left, whether the start was plain or not."""
    for forked in (False, True):
        before = plain_starts(runtime)
        with launch() as kernel:
            open_notebook(kernel, folder)
            assert (plain_starts(runtime) == before) == forked
            kernel.begin("import subprocess; subprocess.run(['sh', '-c', 'echo on; exec sleep 300'])")
            kernel.wait("iopub", lambda message: message["msg_type"] == "stream", "the program runs")
            assert "sleep" in {each.name() for each in psutil.process_iter() if _is_of(each, folder)}
            wait_for(lambda: caught_up(runtime), WARM_SECONDS, "a zygote has all imports")
        wait_for(lambda: not [each for each in psutil.process_iter() if _is_of(each, folder)], 20, "all have ended")


def test_it_dies_while_it_runs(runtime: Path, folder: Path, launch: Callable[[], RawKernel]) -> None:
    """VS Code offers a restart when the process that it started ends, and shows what it wrote to stderr."""
    with launch() as kernel:
        open_notebook(kernel, folder)
        wait_for(lambda: caught_up(runtime), WARM_SECONDS, "a zygote has all imports")
    plain = plain_starts(runtime)
    with launch() as kernel:
        open_notebook(kernel, folder)
        assert plain_starts(runtime) == plain, "it was a plain start"
        assert hidden(kernel, "import os; os.write(2, b'last words')") == "last words"
        kernel.begin("os._exit(7)")
        assert kernel.process.wait(20) == 7
        assert kernel.process.stderr is not None and b"last words" in kernel.process.stderr.read()
