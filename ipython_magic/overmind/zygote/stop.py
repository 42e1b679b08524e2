# SPDX-License-Identifier: MIT
"""The end of all zygotes of a folder: what `overmind stop` does to them. Programs that they started live on.

Nobody is ended by a name. The lock of a zygote, which it holds for life, holds its process id as well, and the process
is held by a descriptor before that is looked at once more: a number that is another's by now is not taken for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from overmind.zygote import census

_POLITE = 2.0  # seconds for one that was asked to go, and for one that was killed
_ALL = 8.0  # seconds until none may be left


def end_all(folder: str) -> list[dict[str, Any]]:
    """Ends every zygote of this folder with its standby, also one that only begins; programs live on. Returns `pid`,
    `mode` and `target` of each. TimeoutError: one is left."""
    with contextlib.suppress(OSError):
        _note_stop(folder)
    deadline = time.monotonic() + _ALL
    ended: list[dict[str, Any]] = []
    while holders := _holders(folder):
        if time.monotonic() > deadline:
            left = ", ".join(str(row["pid"]) if row else "one that just begins" for row in holders)
            raise TimeoutError(f"zygotes did not end in time: {left}")
        rows = [row for row in holders if row is not None]
        ended += _end(rows)
        if not rows:
            time.sleep(0.01)  # until it has its own command line, or its last child has closed the lock
    return [{name: row[name] for name in ("pid", "mode", "target")} for row in ended]


def _note_stop(folder: str) -> None:
    """Who waits for a program's end to become a zygote (launcher/plain.cc) looks whether this file has changed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(os.path.join(folder, "stopped"), flags, 0o600)
    try:
        os.write(descriptor, str(time.time_ns()).encode())
    finally:
        os.close(descriptor)


def _holders(folder: str) -> list[dict[str, Any] | None]:
    """Who holds a lock of this folder; None for one of whom that can't be told at this moment."""
    found = []
    for lock in Path(folder).glob("z*.lock"):
        with contextlib.suppress(OSError):
            if census.lives(str(lock)):
                found.append(_holder(lock))
    return found


def _holder(lock: Path) -> dict[str, Any] | None:
    try:
        pid = int(lock.read_text())
        words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        at = [os.path.basename(word) for word in words].index(lock.stem)
        return {"pid": pid, "lock": lock, "socket": words[at], "mode": words[at + 3], "target": words[at + 4]}
    except (OSError, ValueError, IndexError):
        return None


def _end(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Asks them to go and kills those that do not; returns those that have ended."""
    waiting: dict[int, dict[str, Any]] = {}
    with contextlib.ExitStack() as held:
        for row in rows:
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(row["pid"])
                held.callback(os.close, process)
                if _holder(row["lock"]) != row:
                    continue  # it has ended, and the number may be another's by now
                waiting[process] = row
                try:
                    held.enter_context(census.asked(row["socket"], b"stop"))
                except OSError:  # it imports
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        asked = list(waiting.values())
        _await(waiting, _POLITE)
        for process in waiting:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        _await(waiting, _POLITE)
        return [row for row in asked if row not in waiting.values()]


def _await(waiting: dict[int, dict[str, Any]], seconds: float) -> None:
    """Takes out those that have ended, as they do."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    for process in waiting:
        poll.register(process, select.POLLIN)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for process, _ in poll.poll(left * 1000):
            poll.unregister(process)
            del waiting[process]
