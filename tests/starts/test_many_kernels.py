# SPDX-License-Identifier: MIT
"""Eight kernels of one zygote at once: each computes its own, and the zygote is afterwards what it was before."""

from __future__ import annotations

import contextlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import wait_for
from kernel_sessions import Session, session
from overmind.kernel import kernelspec
from starts import ENGINES, plain_starts, warm_kernel, zygotes

COUNT = 8
CELL = """
import hashlib, os, random
numbers = [hashlib.sha256(b"%d" % ({0} * 1000 + i)).hexdigest() for i in range(1000)]
print({0}, os.getpid(), os.getppid(), random.getrandbits(64), hashlib.sha256("".join(numbers).encode()).hexdigest())
"""


def _private_memory(pid: int) -> int:
    """Bytes that are this process's alone or that it has written to; shared pages come and go with its forks."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line and "kB" in line)
    return int(fields["Anonymous"].split()[0]) * 1024


def _expected(number: int) -> str:
    import hashlib

    numbers = [hashlib.sha256(b"%d" % (number * 1000 + i)).hexdigest() for i in range(1000)]
    return hashlib.sha256("".join(numbers).encode()).hexdigest()


@pytest.mark.parametrize("engine", ENGINES)
def test_eight_at_once(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, "import hashlib, random", engine)
    (row,) = zygotes(runtime)
    zygote = psutil.Process(row["pid"])
    before = plain_starts(runtime)
    figures = []
    for _ in range(3):
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(COUNT) as pool:

            def start(place: Path, stack: contextlib.ExitStack = stack) -> Session:
                # Not tcp: many clients at once take ports that jupyter_client has chosen for others' kernels.
                ipc = session(kernelspec.argv(engine), zygote=True, transport="ipc", folder=place)
                return stack.enter_context(ipc)

            kernels = list(pool.map(start, [Path(tempfile.mkdtemp(dir=runtime)) for _ in range(COUNT)]))
            lines = [text.split() for text in pool.map(lambda k: k[1].text(CELL.format(k[0])), enumerate(kernels))]
            forks = [line for line in lines if int(line[2]) == zygote.pid]
            # On a machine that is busy the zygote may answer one of them too late; that one starts plainly.
            assert len(forks) == COUNT - (len(plain_starts(runtime)) - len(before)) and len(forks) > COUNT / 2
            before = plain_starts(runtime)
            assert [(int(line[0]), line[4]) for line in lines] == [(n, _expected(n)) for n in range(COUNT)]
            assert len({line[1] for line in lines}) == len({line[3] for line in lines}) == COUNT
        wait_for(lambda: len(zygote.children()) == 1, 60, "only a standby is left")
        wait_for(lambda: zygote.children()[0].status() == psutil.STATUS_SLEEPING, 60, "which waits")
        figures.append((len(os.listdir(f"/proc/{zygote.pid}/fd")), _private_memory(zygote.pid)))
    assert len(zygotes(runtime)) == 1 and zygote.is_running()
    assert figures[1][0] == figures[2][0], figures
    assert figures[2][1] - figures[1][1] < 1 << 20, figures
    assert not [each for each in psutil.Process().children(recursive=True) if each.status() == psutil.STATUS_ZOMBIE]
