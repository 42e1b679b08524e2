# SPDX-License-Identifier: MIT
"""Programs that cells started and that must not outlive the kernel: those of its process group, as with ipykernel."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_WALL = 0x40000000  # of Linux: also children that tell their parent nothing when they end


def terminate(grace: float = 2.0) -> None:
    """Asks them to end, and kills what is left after `grace` seconds. Returns at once if there are none."""
    if not _any():
        return
    for signum in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        pids = _in_group()
        for pid in pids:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue
        while pids and time.monotonic() < deadline:
            time.sleep(0.01)
            pids = _in_group()
        if not pids:
            return


def _any() -> bool:
    """Whether this process has children at all, ended ones too; to look through /proc takes 3 ms."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:
        return False
    return True


def _in_group() -> list[int]:
    """Living descendants of this process in its own group."""
    parents: dict[int, int] = {}
    group: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        state, parent, pgrp = fields[0], int(fields[1]), int(fields[2])
        parents[int(entry.name)] = parent
        if pgrp == os.getpgrp() and state != "Z":
            group.add(int(entry.name))
    return [pid for pid in group if _descends(pid, parents)]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    me = os.getpid()
    pid = parents.get(pid, 0)
    while pid > 1 and pid != me:
        pid = parents.get(pid, 0)
    return pid == me
