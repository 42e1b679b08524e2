# SPDX-License-Identifier: MIT
"""A disk that is full where IPython keeps its history: the kernel starts and answers all the same."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_sessions import ipykernel, session
from overmind.kernel import kernelspec
from starts import ENGINES, forked_session, warm_kernel


@pytest.fixture
def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 1 MiB for the IPython folder."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a file system")
    place = folder / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    monkeypatch.setenv("IPYTHONDIR", str(place / "ipython"))
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def _fill(place: Path) -> None:
    with open(place / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


CELLS = ("1 + 1", "print('out')", "1 / 0", "_ih[1:3]", "x = 5\nx")


def _answers(argv: list[str]) -> list[object]:
    with session(argv, zygote=True) as running:
        found: list[object] = []
        for cell in CELLS:
            reply, outputs = running.run(cell)
            kinds = [each["msg_type"] for each in outputs if each["content"].get("name") != "stderr"]
            found.append((reply["status"], reply.get("ename"), kinds))
        return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("when", ["before the first start", "between two starts", "while it runs"])
def test_full(runtime: Path, folder: Path, small: Path, engine: str, when: str) -> None:
    """As ipykernel does."""
    if when == "before the first start":
        with session(ipykernel()):
            pass  # it makes the folders; on a full disk ipykernel itself can't
        _fill(small)
    warm_kernel(runtime, folder, "1", engine)
    if when == "between two starts":
        _fill(small)
    if when == "while it runs":
        with forked_session(runtime, engine) as running:
            _fill(small)
            for _ in range(3):
                assert running.run("1 + 1")[0]["status"] == "ok"
            assert running.text("print(6 * 7)") == "42\n"
        return
    expected = _answers(ipykernel())
    for _ in range(2):
        assert _answers(kernelspec.argv(engine)) == expected
