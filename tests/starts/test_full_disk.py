# SPDX-License-Identifier: MIT
"""A disk that is full where IPython keeps its history, where a user's home or our own files are: the kernel starts and
answers all the same."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import stop_daemon
from kernel_sessions import ipykernel, session
from overmind.kernel import kernelspec
from starts import ENGINES, forked_session, native, outcome, overmind_run, warm_kernel


@contextlib.contextmanager
def _mounted(place: Path, options: str) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("only root can mount a file system")
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 1 MiB for the IPython folder."""
    with _mounted(folder / "small", "size=1m") as place:
        monkeypatch.setenv("IPYTHONDIR", str(place / "ipython"))
        yield place


def _fill(place: Path) -> None:
    with open(place / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


CELLS = ("1 + 1", "print('out')", "1 / 0", "_ih[1:3]", "x = 5\nx")


def _answers(argv: list[str], **options: Any) -> list[object]:
    with session(argv, zygote=True, **options) as running:
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
            pass  # it makes the folders; on a full disk ipykernel itself can't, and ends
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


def _heard(argv: list[str], folder: Path, **options: Any) -> tuple[list[object], str]:
    """Answers, and what the kernel wrote for the server's log."""
    with open(folder / "stderr", "w+b") as file:
        found = _answers(argv, stderr=file, **options)
        file.seek(0)
        return found, file.read().decode()


DISKS = {"no room": "size=64k", "no more files": "nr_inodes=1", "read only": "ro"}


@pytest.fixture(params=DISKS)
def useless(request: pytest.FixtureRequest, runtime: Path) -> Iterator[Path]:
    """A file system that nothing can be written to, from the beginning."""
    with _mounted(runtime / "disk", DISKS[request.param]) as place:
        if request.param == "no room":
            _fill(place)
        yield place


@pytest.mark.skipif("xeus" not in ENGINES, reason="built without the kernel; ipykernel itself ends in this case")
@pytest.mark.parametrize("variable", ["HOME", "IPYTHONDIR"])
def test_no_folder_for_ipython(
    runtime: Path, folder: Path, useless: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What IPython does itself where its folder can't be written: a temporary one; here also where the disk is full."""
    expected = _answers(kernelspec.argv())
    monkeypatch.delenv("IPYTHONDIR", raising=False)
    monkeypatch.setenv(variable, str(useless))
    monkeypatch.setenv("TMPDIR", str(folder))
    for _ in range(2):
        found, said = _heard(kernelspec.argv(), folder)
        assert found == expected
        assert "Traceback" not in said and str(useless) in said, said
        assert len([line for line in said.splitlines() if "can't be made" in line]) <= 1, said
        assert not list(folder.glob("ipython-*")), "the folder in its place goes with it"


@pytest.mark.parametrize("engine", ENGINES)
def test_no_runtime_folder(
    runtime: Path, folder: Path, useless: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain starts; `overmind doctor` says why."""
    expected = _answers(kernelspec.argv(engine))
    monkeypatch.setenv("OVERMIND_RUNTIME_DIR", str(useless))
    try:
        for _ in range(2):
            found, said = _heard(kernelspec.argv(engine), folder)
            assert found == expected and "Traceback" not in said, said
        told = outcome([sys.executable, "-m", "overmind.cli", "doctor"])
        assert told.code == 1 and f"runtime folder: {useless} " in told.out, told
        assert "is full" in told.out or "can't be written" in told.out
    finally:
        stop_daemon(useless)


@pytest.mark.parametrize("size", [0, 100])
def test_a_limit_of_file_size(runtime: Path, folder: Path, size: int) -> None:
    """The signal for a file that would grow beyond ends neither launcher nor program."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    script = folder / "script.py"
    script.write_text("print('here')\n")
    for _ in range(3):  # also with a log that has reached the limit
        assert outcome(overmind_run(str(script)), preexec_fn=limit) == native(str(script), preexec_fn=limit)
