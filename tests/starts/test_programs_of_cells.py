# SPDX-License-Identifier: MIT
"""What becomes of programs that a cell started, when the kernel is interrupted or ends: the same as with ipykernel."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import wait_for
from kernel_sessions import ipykernel, session
from overmind.kernel import kernelspec
from starts import ENGINES, gone, plain_starts, warm_kernel
from vscode_kernel import RawKernel

# Programs with a session or a group of their own, one without, and one whose parent has ended.
CELL = """
import subprocess
started = {
    "session": subprocess.Popen(["sleep", "300"], start_new_session=True).pid,
    "setsid": subprocess.Popen(["setsid", "sleep", "300"]).pid,
    "group": subprocess.Popen(["sleep", "300"], process_group=0).pid,
    "plain": subprocess.Popen(["sleep", "300"]).pid,
    "below": subprocess.Popen(["setsid", "sh", "-c", "sleep 300; true"]).pid,
    "orphan": int(subprocess.run("sleep 300 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True).stdout),
}
print(started)
"""

KERNELS = ["native", *ENGINES]


def _argv(kernel: str) -> list[str]:
    return ipykernel() if kernel == "native" else kernelspec.argv(kernel)


@contextlib.contextmanager
def _programs(printed: str) -> Iterator[dict[str, int]]:
    """Those that the cell says it has started, running by now; ended with the block."""
    pids: dict[str, int] = ast.literal_eval(printed)
    inner: list[psutil.Process] = []
    try:
        wait_for(lambda: _is_sleep(pids["setsid"]) and bool(_below(pids["below"])), 20, "setsid has run its programs")
        inner = _below(pids["below"])
        yield pids | {"inner": inner[0].pid}
    finally:
        for pid in (*pids.values(), *(each.pid for each in inner)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_sleep(pid: int) -> bool:
    return psutil.Process(pid).name() == "sleep"


def _below(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if each.name() == "sleep"]


def _ended(programs: dict[str, int], names: set[str], when: str) -> None:
    """Those of these names have, and no others."""
    wait_for(lambda: all(gone(programs[name]) for name in names), 10, f"{names} have ended after {when}")
    assert {name for name, pid in programs.items() if gone(pid)} == names, when


@pytest.mark.parametrize("kernel", KERNELS)
def test_in_jupyter(runtime: Path, folder: Path, kernel: str) -> None:
    """jupyter_client signals groups."""
    if kernel != "native":
        warm_kernel(runtime, folder, "1", kernel)
    starts = plain_starts(runtime)
    for end in ("interrupt", "restart", "kill"):
        with session(_argv(kernel), zygote=True) as running, _programs(running.text(CELL)) as programs:
            if end == "interrupt":
                sent = running.send("print('on', flush=True)\nimport time\ntime.sleep(300)")
                running.outputs(sent, until=lambda message: message["msg_type"] == "stream")
                running.manager.interrupt_kernel()
                assert running.reply(sent)["content"]["ename"] == "KeyboardInterrupt"
                _ended(programs, {"plain"}, end)  # the orphan ignores it: its shell sees to that
            elif end == "restart":
                os.kill(programs["orphan"], signal.SIGKILL)  # whether it ends depends on how long ipykernel takes
                running.manager.restart_kernel(now=False)
                _ended(programs, {"plain", "orphan"}, end)
            else:
                running.client.stop_channels()
                running.manager.shutdown_kernel(now=True)
                _ended(programs, {"plain", "orphan"}, end)
    assert plain_starts(runtime) == starts, "one was a plain start"


@pytest.mark.parametrize("kernel", KERNELS)
def test_in_vscode(runtime: Path, folder: Path, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """VS Code signals what it finds below the process that it has started, whatever group that is in."""
    monkeypatch.setenv("PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING", "1")  # as a RawKernel has it: one zygote for both
    if kernel != "native":
        warm_kernel(runtime, folder, "1", kernel)
    starts = plain_starts(runtime)
    below = {"session", "setsid", "group", "plain", "below", "inner"}
    for end in ("interrupt", "dispose"):
        with RawKernel(_argv(kernel), folder, dict(os.environ)) as running:
            running.start()
            (said,) = running.execute(CELL)[1]
            with _programs(said["content"]["text"]) as programs:
                if end == "interrupt":
                    sent = running.begin("print('on', flush=True)\nimport time\ntime.sleep(300)")
                    running.wait("iopub", lambda message: message["msg_type"] == "stream", "the cell runs")
                    running.interrupt()
                    assert running.finish(sent)[0]["ename"] == "KeyboardInterrupt"
                else:
                    running.dispose()
                    running.process.wait(20)
                _ended(programs, below, end)
    assert plain_starts(runtime) == starts, "one was a plain start"
