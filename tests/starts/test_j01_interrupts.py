# SPDX-License-Identifier: MIT
"""J01: an interrupt of a kernel reaches what its cell started, and the kernel lives on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import wait_for
from starts import ENGINES, Kernel, plain_starts, warm_kernel

CELLS = {
    "subprocess": "import subprocess; subprocess.run(['sleep', '300'])",
    "shell": "get_ipython().system('sleep 300')",
    "python": "import time; time.sleep(300)",
}


def _sleepers(kernel: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [each for each in psutil.Process(kernel).children(recursive=True) if each.name() == "sleep"]
    return []


def _soon(condition: Callable[[], bool], then: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        wait_for(condition, 30, "the cell runs")
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _waits_for_sleep(pid: int) -> Callable[[], bool]:
    """Not only that `sleep` is there: IPython's system() leaves it behind if it is interrupted as it starts it."""
    waits = _is_asleep(pid)
    return lambda: bool(_sleepers(pid)) and waits()


@pytest.mark.parametrize("engine", ENGINES)
def test_interrupt(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, engine=engine)
    starts = plain_starts(runtime)
    with Kernel(folder, engine) as kernel:
        assert plain_starts(runtime) == starts, "it was a plain start"
        pid = int(kernel.run("import os; print(os.getpid(), os.getpgrp(), os.getsid(0))").split()[0])
        assert pid != kernel.launcher
        for name, cell in CELLS.items():
            started = _is_asleep(pid) if name == "python" else _waits_for_sleep(pid)
            thread = _soon(started, kernel.manager.interrupt_kernel)
            said = kernel.run(cell, timeout=60)
            thread.join()
            assert "KeyboardInterrupt" in said or name == "shell"
            assert kernel.run("print(6 * 7)", timeout=30) == "42\n"
            wait_for(lambda: not _sleepers(pid), 10, "no sleep is left")


def _is_asleep(pid: int) -> Callable[[], bool]:
    """`time.sleep` of the main thread: no condition says it better than a moment without running."""
    before: list[float] = []

    def check() -> bool:
        before.append(sum(psutil.Process(pid).cpu_times()[:2]))
        return len(before) > 20 and before[-1] == before[-20]

    return check


@pytest.mark.parametrize("engine", ENGINES)
def test_a_group_of_its_own(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, engine=engine)
    with Kernel(folder, engine) as kernel:
        pid, group, session = map(int, kernel.run("import os; print(os.getpid(), os.getpgrp(), os.getsid(0))").split())
        assert pid == group == session
