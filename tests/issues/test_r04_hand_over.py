# SPDX-License-Identifier: MIT
"""R04: /proc/<pid>/fd is no way to hand a descriptor over.

Opening another process's memory through /proc/<pid>/fd works for root and fails for everybody else as soon as the
daemon is not dumpable, runs as another user, or /proc hides it. Descriptors travel over the socket. As root every way
works (measured), so these tests run as a normal user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import processes_of
from processes import Process, as_user, hand_over, normal_user, write_module

LOADER = "import numpy\ndef load(path):\n    return [open(path).read(), numpy.full(300_000, 7.0)]\n"

LOAD = """
import sys, overmind
sys.path.insert(0, {folder!r})
import mylib
text, array = overmind.load(mylib.load, {folder!r} + "/data")
value = [text, float(array.sum())]
"""


def prepared(folder: Path, runtime: Path) -> str:
    write_module(folder / "mylib.py", LOADER)
    (folder / "data").write_text("content")
    hand_over(runtime, normal_user())
    return LOAD.format(folder=str(folder))


# Runs before main() of the program that it is preloaded into.
CLOSED = (
    "#include <sys/prctl.h>\n__attribute__((constructor)) static void close_proc(void) { prctl(PR_SET_DUMPABLE, 0); }\n"
)


def test_a_client_and_a_daemon_that_are_not_dumpable(folder: Path, runtime: Path) -> None:
    """Of a process that is not dumpable /proc/<pid>/fd is root's. The daemon is made so by a preloaded library, the
    client asks for it itself."""
    source = prepared(folder, runtime)
    uid = normal_user()
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C compiler for the library that closes the daemon's /proc")
    from overmind import store

    library = runtime / "closed.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=CLOSED.encode(), check=True
    )
    library.chmod(0o644)
    without_rights = [part for part in as_user(uid) if "-caps=" not in part]
    program = runtime / "overmindd"  # this user can't reach a program in a folder of root's
    shutil.copy(store.config().daemon_path, program)
    preload = {**os.environ, "LD_PRELOAD": str(library)}
    subprocess.run([*without_rights, program, f"--runtime-dir={runtime}"], check=True, env=preload, capture_output=True)
    for daemon in processes_of(runtime):
        listing = subprocess.run([*without_rights, "ls", f"/proc/{daemon.pid}/fd"], capture_output=True)
        assert listing.returncode != 0, "the daemon was meant to be closed to its own user"

    closed = "import ctypes\nassert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE\n"
    for outcome in ("miss", "hit"):
        with Process(closed + source, uid=uid) as client:
            run = client.result()
        assert run.value == ["content", 2_100_000.0] and run.outcomes == [outcome], run


def test_a_daemon_of_a_normal_user(folder: Path, runtime: Path) -> None:
    source = prepared(folder, runtime)
    for outcome in ("miss", "hit"):
        with Process(source, uid=normal_user()) as client:
            run = client.result()
        assert run.value == ["content", 2_100_000.0] and run.outcomes == [outcome], run
    assert {process.uids().effective for process in processes_of(runtime)} == {normal_user()}
