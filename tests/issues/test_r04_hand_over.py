# SPDX-License-Identifier: MIT
"""R04: /proc/<pid>/fd is no way to hand a descriptor over.

Opening another process's memory through /proc/<pid>/fd works for root and fails for everybody else as soon as the
daemon is not dumpable, runs as another user, or /proc hides it. Descriptors travel over the socket. As root every way
works (measured), so these tests run as a normal user.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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


def test_a_client_and_a_daemon_that_are_not_dumpable(folder: Path, runtime: Path) -> None:
    """A process without the right to read its own program is not dumpable: its /proc/<pid>/fd is root's. The daemon is
    a copy of overmindd that its user may run and not read; the client asks prctl for the same."""
    source = prepared(folder, runtime)
    uid = normal_user()
    from overmind import store

    program = runtime / "overmindd"
    shutil.copy(store.config().daemon_path, program)
    program.chmod(0o111)
    without_rights = [part for part in as_user(uid) if "-caps=" not in part]
    subprocess.run([*without_rights, str(program), f"--runtime-dir={runtime}"], check=True, stderr=subprocess.DEVNULL)
    for daemon in processes_of(runtime):
        listing = subprocess.run([*as_user(uid), "ls", f"/proc/{daemon.pid}/fd"], capture_output=True)
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
