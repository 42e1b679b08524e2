# SPDX-License-Identifier: MIT
"""Last of all tests, by its name: what the tests before it left behind.

A process of Overmind counts as this run's if its runtime folder is one that the `runtime` fixture makes.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

import psutil
import pytest

_OURS = "/tmp/ov-"


def _mine(process: psutil.Process) -> bool:
    """Started since this run began, or in a folder of its tests."""
    try:
        return process.create_time() >= psutil.Process().create_time()
    except psutil.NoSuchProcess:
        return False


def test_it_runs_last(request: pytest.FixtureRequest) -> None:
    here = Path(__file__)
    names = [item.path for item in request.session.items]
    last = max(number for number, path in enumerate(names) if path != here) if set(names) != {here} else -1
    assert last < names.index(here), f"{names[last]} runs after the check for leaks"


def test_no_process_of_overmind_is_left() -> None:
    left = []
    for process in psutil.process_iter(["name", "cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [process.info["name"] or ""])
        ours = _OURS in words and "overmindd" in words
        snapshot = "overmind-snap" in (process.info["name"] or "") and _mine(process)
        if (ours and _mine(process)) or snapshot:
            left.append((process.pid, words, process.info["status"]))
    assert left == []


def test_no_runtime_folder_is_left() -> None:
    began = psutil.Process().create_time()
    left = [path for path in glob.glob(f"{_OURS}*") if os.stat(path).st_mtime >= began]
    assert left == []


def test_no_descriptor_and_no_shared_memory_is_left() -> None:
    own = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    assert [target for target in own if "memfd" in target or _OURS in target or "overmind" in target] == []
    assert [name for name in os.listdir("/dev/shm") if "overmind" in name] == []
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:overmind" not in maps


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
