# SPDX-License-Identifier: MIT
"""Kernels that are started while something of theirs is killed at a random moment, round after round."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from conftest import processes_of, wait_for
from starts import zygotes

VICTIMS = ("server", "launcher", "kernel", "zygote", "nobody")
_ANSWER_SECONDS = 120.0

# Reads "start" and "stop"; says "alive PID" or "dead" of each start, "stopped" after each stop.
_SERVER = """
import queue, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kernel_sessions import Session
from overmind.kernel import kernelspec

def ask(running):
    msg_id = running.send("import os\\nprint(6 * 7, os.getpid())")
    while running.manager.is_alive():
        try:
            message = running.client.get_iopub_msg(timeout=0.2)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") == msg_id and message["msg_type"] == "stream":
            answer, pid = message["content"]["text"].split()
            return f"alive {pid}" if answer == "42" else "wrong"
    return "dead"

running = None
for number, line in enumerate(sys.stdin):
    if line == "stop\\n":
        if running is not None:
            running.close()
        running = None
        print("stopped", flush=True)
        continue
    folder = Path(sys.argv[2], str(number))
    folder.mkdir()
    try:
        running = Session(kernelspec.argv(sys.argv[3]), transport="ipc", folder=folder, zygote=True)
        print(ask(running), flush=True)
    except RuntimeError as error:
        print("dead" if "died" in str(error) else f"error {error}", flush=True)
"""


@dataclass(frozen=True)
class Round:
    """Who was killed after how many seconds, and what the server said of the kernel: alive, dead, or nothing."""

    victim: str
    after: float
    said: str


class _Server:
    """A process that starts kernels, as a notebook server does."""

    def __init__(self, folder: Path, engine: str) -> None:
        tests = str(Path(__file__).resolve().parent)
        folder.mkdir()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _SERVER, tests, str(folder), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, word: str) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(f"{word}\n")
            self.popen.stdin.flush()

    def hear(self) -> str:
        """Its next line; "" if it is dead. AssertionError if neither comes."""
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], _ANSWER_SECONDS)
        assert ready, "the server hangs: its kernel neither answers nor dies"
        return self.popen.stdout.readline().strip()

    def end(self) -> None:
        """Its input ends, and it with that; or it is dead already."""
        for stream in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        self.popen.wait(60)


def _pick(runtime: Path, victim: str, server: _Server) -> list[int]:
    """Who may be killed under that name just now."""
    zygote_pids = [row["pid"] for row in zygotes(runtime)]
    if victim == "server":
        return [server.popen.pid]
    if victim == "zygote":
        return zygote_pids
    with contextlib.suppress(psutil.Error):
        own = psutil.Process(server.popen.pid).children()
        if victim == "launcher":
            return [each.pid for each in own]
        if victim == "kernel":  # or the standby that is about to become one
            return [each.pid for pid in zygote_pids for each in psutil.Process(pid).children()]
    return []


def _kill_one(pids: list[int], chance: random.Random) -> bool:
    if not pids:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    return True


def rounds(runtime: Path, folder: Path, engine: str, count: int, seed: int) -> Iterator[Round]:
    """Plays them; AssertionError as soon as a start that nobody disturbed has no kernel, or something is left."""
    chance = random.Random(seed)
    server, number, usual = _Server(folder / "server", engine), 0, 2.0
    try:
        for _ in range(count):
            if chance.random() < 0.8:  # else it may still be loading
                wait_for(lambda: _is_settled(runtime), 60, "a zygote that was begun waits for starts")
            victim, after = chance.choice(VICTIMS), chance.uniform(0, usual)
            if number == 0:
                victim = "nobody"
            began = time.monotonic()
            server.say("start")
            if victim != "nobody":
                # A random moment is what this is about: not a condition.
                time.sleep(after)
                _kill_one(_pick(runtime, victim, server), chance)
            said = server.hear()
            if victim == "nobody":
                usual = 0.5 * usual + 0.6 * (time.monotonic() - began)
            _judge(victim, said)
            server.say("stop")
            if victim == "server":
                server.end()
                server = _Server(folder / f"server{number}", engine)
            else:
                assert server.hear() == "stopped"
            wait_for(lambda: not left(runtime), 20, f"launcher and kernel have ended ({victim} was killed)")
            number += 1
            yield Round(victim, after, said.partition(" ")[0])
    finally:
        server.end()


def _judge(victim: str, said: str) -> None:
    if victim in ("zygote", "nobody"):
        assert said.startswith("alive "), f"no kernel, though {victim} was killed: {said}"
    elif victim == "server":
        assert said == "" or said.startswith("alive "), said
    else:
        assert said == "dead" or said.startswith("alive "), said


def left(runtime: Path) -> list[psutil.Process]:
    """Launchers and kernels: of all that a start makes only a zygote with its standby may stay."""
    found, standbys = [], set()
    for process in processes_of(runtime):
        with contextlib.suppress(psutil.Error):
            words, parent = process.cmdline(), process.ppid()
            if "overmindd" in words[0] or _is_zygote(process.pid, runtime):
                continue
            if "zygote" in words[2:3] and parent not in standbys and _is_zygote(parent, runtime):
                standbys.add(parent)
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_settled(runtime: Path) -> bool:
    ready = {row["pid"] for row in zygotes(runtime)}
    return all(each.pid in ready for each in processes_of(runtime) if _is_zygote(each.pid, runtime))


def _is_zygote(pid: int, runtime: Path) -> bool:
    """It holds its lock from its first moment on, and no fork of it does."""
    with contextlib.suppress(OSError):
        held = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        return any(path.startswith(f"{runtime}/") and path.endswith(".lock") for path in held)
    return False
