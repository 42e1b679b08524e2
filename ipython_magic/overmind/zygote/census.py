# SPDX-License-Identifier: MIT
"""Zygotes, seen from outside: a file of facts beside each one's socket, and the limits on all of them together."""

from __future__ import annotations

import calendar
import contextlib
import fcntl
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from overmind import _core

MOST = 6  # zygotes of one user
SHARE = 0.25  # of the memory that is available, for all of them together
LEAST_FREE = 0.05  # of the machine's memory: below that a zygote that serves nobody goes
_EVERY = 5.0  # seconds between two looks at the memory
_TAIL = 64 << 10  # bytes of the log in which the last plain start is looked for
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_PLAIN = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) launcher \d+ plain start of (.*?): (.*)")

ASKED_TO_GO = {b"retire": "another zygote needs its place", b"stop": "`overmind stop`"}  # and what the log says then


class Census:
    """One zygote's own entry. Every fault is swallowed: facts are for people."""

    def __init__(self, socket_path: str, mode: str, target: str) -> None:
        self._path = f"{socket_path}.json"
        self._facts: dict[str, Any] = {
            "pid": os.getpid(),
            "socket": socket_path,
            "mode": mode,
            "target": target,
            "started": time.time(),
            "last_used": time.time(),
            "forks": 0,
            "modules": 0,
            "learned": [],
            "memory": 0,
            "running": 0,
        }
        self._looked = 0.0
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # of one that was killed

    def loaded(self, modules: int, learned: list[int]) -> None:
        """All imports of the profile with the stamp `learned` are done."""
        self._facts.update(modules=modules, learned=learned, memory=memory_of(os.getpid()))
        self._write()

    def learned(self, stamp: list[int]) -> None:
        """A newer profile asks for nothing more."""
        self._facts.update(learned=stamp)
        self._write()

    def forked(self) -> None:
        """A program was started."""
        self._facts["forks"] += 1
        self._facts["last_used"] = time.time()
        self._looked = 0.0

    def look(self, running: int, standby: int | None) -> str | None:
        """Now and then, when there is nothing to do. A reason if this zygote should go. `standby`: its process id."""
        if time.monotonic() - self._looked < _EVERY:
            return None
        self._looked = time.monotonic()
        # The two share most of it: each alone has half on its account.
        memory = memory_of(os.getpid()) + (0 if standby is None else memory_of(standby))
        self._facts.update(running=running, memory=memory)
        self._write()
        if running == 0 and _core.available_memory() < LEAST_FREE * _total():
            return "memory is short"
        return None

    def make_room(self) -> None:
        """Asks the zygotes that were used least recently to retire, until the others are within the limits."""
        rows = sorted(read(os.path.dirname(self._path)), key=lambda row: float(row["last_used"]))
        allowed = SHARE * _core.available_memory()
        while len(rows) > MOST or sum(int(row["memory"]) for row in rows) > allowed:
            others = [row for row in rows if row["pid"] != os.getpid()]
            if not others:
                return
            ask_to_retire(str(others[0]["socket"]))
            rows.remove(others[0])

    def retired(self, why: str) -> None:
        """The entry goes, a line in the log stays."""
        self.note(f"retired: {why}")
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def note(self, message: str) -> None:
        """One line in the launcher's log."""
        with contextlib.suppress(Exception):
            text = "".join(c if c.isprintable() else "?" for c in message)
            when = time.strftime(_TIME, time.gmtime())
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            log = os.open(_core.config().launcher_log_path, flags, 0o600)
            os.write(log, f"{when} zygote {os.getpid()} {self._facts['target']}: {text}\n".encode())
            os.close(log)

    def _write(self) -> None:
        mine = f"{self._path}.{os.getpid()}"
        with contextlib.suppress(OSError):
            Path(mine).write_text(json.dumps(self._facts))
            os.replace(mine, self._path)


def memory_of(pid: int) -> int:
    """Proportional set size in bytes; 0 if it can't be read."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read(folder: str) -> list[dict[str, Any]]:
    """The facts of every zygote that lives, in no order."""
    rows = []
    for path in Path(folder).glob("z*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = json.loads(path.read_text())
            command = Path(f"/proc/{facts['pid']}/cmdline").read_bytes()  # empty of a zombie
            if os.fsencode(facts["socket"]) in command and lives(f"{facts['socket']}.lock"):
                rows.append(facts)
    return rows


def last_plain_start() -> dict[str, Any] | None:
    """When the last start without a zygote was (seconds since the epoch), of what, and why; None if the log tells of
    none."""
    lines: list[str] = []
    with contextlib.suppress(OSError), open(_core.config().launcher_log_path, "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
        lines = log.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if found := _PLAIN.fullmatch(line):
            when = calendar.timegm(time.strptime(found[1], _TIME))
            return {"when": when, "target": found[2], "reason": found[3]}
    return None


def lives(lock: str) -> bool:
    """A zygote holds its lock as long as it lives."""
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def ask_to_retire(path: str) -> None:
    """It answers by ending."""
    with contextlib.suppress(OSError), asked(path, b"retire") as channel:
        channel.recv(64)


def asked(path: str, word: bytes) -> socket.socket:
    """The connection on which a zygote was asked to go: it listens to nobody who has hung up. OSError: it is busy."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.settimeout(1.0)
        channel.connect(path)
        channel.sendall(word)
    except BaseException:
        channel.close()
        raise
    return channel
