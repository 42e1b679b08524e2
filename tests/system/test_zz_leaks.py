# SPDX-License-Identifier: MIT
"""Last of all tests, by its name: what the tests before it left behind.

Runtime folders, and with them daemons, carry the name of the run (the `runtime` fixture), so that runs that go on
beside this one don't count.
"""

from __future__ import annotations

import gc
import glob
import os
from pathlib import Path

import psutil
import pytest
from conftest import RUN, wait_for
from private_store import snapshots

_OURS = f"/tmp/ov-{RUN}-"
pytestmark = [pytest.mark.alone, pytest.mark.timeout(3600)]  # the wait counts


def test_it_is_the_last_of_its_folder(request: pytest.FixtureRequest) -> None:
    """Folders are run in the order of their names, and this one is the last; whoever names others runs them later."""
    here = Path(__file__)
    files = [item.path for item in request.session.items if item.path.parent == here.parent]
    assert files[-1] == here and here.parent.name >= max(p.name for p in here.parents[1].iterdir() if _has_tests(p))


def _has_tests(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("test_*.py"))


def test_no_process_of_overmind_is_left() -> None:
    left = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if _OURS in words:
            left.append((process.pid, words))
    assert left == []
    before = snapshots()
    wait_for(lambda: not before & snapshots(), 30, "snapshot processes have ended")


def test_no_runtime_folder_is_left() -> None:
    assert glob.glob(f"{_OURS}*") == []


def test_no_descriptor_and_no_shared_memory_is_left() -> None:
    gc.collect()
    own = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    assert [target for target in own if "memfd" in target or _OURS in target or "overmind" in target] == []
    assert [name for name in os.listdir("/dev/shm") if "overmind" in name] == []
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:overmind" not in maps


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
