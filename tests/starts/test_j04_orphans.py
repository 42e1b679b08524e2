# SPDX-License-Identifier: MIT
"""J04: a kernel ends with its server and its launcher, and lives on without its zygote; nothing is left of many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import wait_for
from starts import ENGINES, Kernel, gone, plain_starts, warm_kernel, zygotes

ROUNDS = 8  # `python tests/benchmarks/restarts.py --rounds 200` does more

SERVER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
runtime = os.environ["OVERMIND_RUNTIME_DIR"]
from starts import Kernel
os.environ["OVERMIND_RUNTIME_DIR"] = runtime  # conftest chose another
kernel = Kernel(Path(sys.argv[1]), sys.argv[3])
print(kernel.run("import os; print(os.getpid())").strip(), kernel.launcher, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_the_server_is_killed(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, engine=engine)
    tests = str(Path(__file__).resolve().parents[1])
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), tests, engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None and server.stdin is not None
    kernel, launcher = map(int, server.stdout.readline().split())
    assert not gone(kernel) and kernel != launcher, plain_starts(runtime)
    server.kill()
    server.wait()
    server.stdin.close()
    server.stdout.close()
    wait_for(lambda: gone(kernel) and gone(launcher), 5, "kernel and launcher have ended")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_zygote_is_killed(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, engine=engine)
    with Kernel(folder, engine) as kernel:
        kernel.run("x = 1")
        for row in zygotes(runtime):
            os.kill(row["pid"], signal.SIGKILL)
        assert kernel.run("print(x)") == "1\n"
        kernel.restart()  # plainly
        assert kernel.run("print(2)") == "2\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_launcher_is_killed(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, engine=engine)
    with Kernel(folder, engine) as kernel:
        pid, child = map(
            int,
            kernel.run(
                "import os, subprocess; p = subprocess.Popen(['sleep', '300']); print(os.getpid(), p.pid)"
            ).split(),
        )
        os.kill(kernel.launcher, signal.SIGKILL)
        wait_for(lambda: gone(pid) and gone(child), 5, "the kernel and its child have ended")
        wait_for(lambda: not kernel.manager.is_alive(), 5, "the launcher's own end is seen")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_kernel_is_killed(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, engine=engine)
    with Kernel(folder, engine) as kernel:
        os.kill(int(kernel.run("import os; print(os.getpid())")), signal.SIGKILL)
        wait_for(lambda: not kernel.manager.is_alive(), 5, "the launcher has ended")


@pytest.mark.parametrize("engine", ENGINES)
def test_many_restarts_leave_nothing(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, engine=engine)
    starts = plain_starts(runtime)
    (zygote,) = zygotes(runtime)
    with Kernel(folder, engine) as kernel:
        descriptors = []
        for _ in range(ROUNDS):
            kernel.restart()
            kernel.run("pass")
            descriptors.append(len(os.listdir(f"/proc/{zygote['pid']}/fd")))
        assert plain_starts(runtime) == starts, "one was a plain start"
    assert max(descriptors) <= min(descriptors[:2]) + 3, descriptors
    wait_for(lambda: len(_family(zygote["pid"])) <= 1, 10, "only a standby is left")
    assert [each.status() for each in _family(zygote["pid"])].count(psutil.STATUS_ZOMBIE) == 0


def _family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
