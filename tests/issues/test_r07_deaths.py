# SPDX-License-Identifier: MIT
"""R07: two first loads at once, and owners that die in the middle.

Eight kernels that start together each load the model; a loader that is killed leaves a lock that nobody releases, a
half-written file that the next one reads, a socket that nobody listens on. One native load is enough, a dead holder
passes its right on, nothing partial is ever served, and whoever is killed, every client has a correct object in a
bounded time.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import processes_of, stop_daemon, wait_for
from processes import Process, kill_daemon, write_module

SECONDS = 1.0  # of one native load
BOUND = 45.0  # seconds until any client must have its object, however many loads and starts it takes

# Tells the test of each real call through a socket: a file that it wrote to would be one that changed under it.
LOADER = """
import os, socket, time
import numpy
def load(path, seconds):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.sendto(b"%d" % os.getpid(), path + ".calls")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    with open(path) as file:
        number = int(file.read())
    return [numpy.full(2_000_000, number, dtype=numpy.int64), number]
"""


class Loading:
    """The loader, its file and the pids of those that really called it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_module(folder / "slow.py", LOADER)
        (folder / "data").write_text("7")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "data.calls"))
        self._socket.setblocking(False)
        self._calls: list[int] = []

    def close(self) -> None:
        self._socket.close()

    def start(self, seconds: float = SECONDS) -> Process:
        return Process(f"""
import sys, overmind
sys.path.insert(0, {str(self.folder)!r})
import slow
array, number = overmind.load(slow.load, {str(self.folder / "data")!r}, {seconds})
value = [array.shape[0], int(array.min()), int(array.max()), number]
""")

    def calls(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._calls.append(int(self._socket.recv(20)))
        return self._calls

    @staticmethod
    def check(client: Process) -> str:
        run = client.result(BOUND, check=False)
        # A daemon killed at the end makes wait_published() say no; the object and its record come before that.
        if run.returncode != 0:
            assert "not committed" in run.stderr, client.output()
            return "lost"
        assert run.value == [2_000_000, 7, 7, 7], run
        (outcome,) = run.outcomes
        return str(outcome)


@pytest.fixture
def loading(runtime: Path) -> Iterator[Loading]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short: there is a socket in it
        loading = Loading(Path(folder))
        yield loading
        loading.close()


def test_eight_at_once_make_one_load(loading: Loading) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(loading.start(3.0)) for _ in range(8)]
        outcomes = sorted(loading.check(client) for client in clients)
    assert outcomes == ["hit"] * 7 + ["miss"]
    assert len(loading.calls()) == 1


def test_a_dead_loader_passes_its_right_on(loading: Loading) -> None:
    with loading.start(30.0) as first:
        wait_for(lambda: len(loading.calls()) == 1, 30, "the first is in its load")
        assert loading.calls() == [first.pid]
        # The waiters ask for the same key: the same arguments.
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(loading.start(30.0)) for _ in range(3)]
            wait_for(lambda: all(_connected(client) for client in clients), 30, "the others wait")
            first.kill()
            wait_for(lambda: len(loading.calls()) > 1, 25, "the next has taken over, long before a load would end")
            assert len(loading.calls()) == 2 and loading.calls()[1] in [client.pid for client in clients]
            for client in clients:
                client.kill()


def _has_spawned_keeper(runtime: Path) -> bool:
    """A keeper that holds the entries; while it is being spawned it is its server's image, with its descriptors."""
    for process in processes_of(runtime):
        with contextlib.suppress(psutil.Error, OSError):
            folder = f"/proc/{process.pid}/fd"
            links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
            if any("--adopt-server" in word for word in process.cmdline()) and any("memfd:" in link for link in links):
                return True
    return False


def _connected(client: Process) -> bool:
    with contextlib.suppress(psutil.Error, OSError):  # a descriptor may be closed while it is looked at
        return any(
            "socket:" in os.readlink(f"/proc/{client.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{client.pid}/fd")
        )
    return False


@pytest.mark.parametrize("seed", range(4))
def test_a_loader_killed_at_any_point(loading: Loading, seed: int) -> None:
    """In the imports, in the load, in the publication, after it: whoever comes then gets the right object."""
    chance = random.Random(f"loader {seed}")
    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(loading.start())
        wait_for(lambda: bool(loading.calls()) or not victim.alive(), 30, "the load has begun")
        others = [stack.enter_context(loading.start()) for _ in range(2)]
        _pause(chance.uniform(0.0, 1.3 * SECONDS))
        victim.kill()
        assert "lost" not in [loading.check(client) for client in others]
        assert loading.check(stack.enter_context(loading.start())) == "hit"
    assert len(loading.calls()) <= 2


@pytest.mark.parametrize("whom", ["server", "keeper", "both", "all at intervals"])
def test_a_daemon_killed_at_any_point(loading: Loading, runtime: Path, whom: str) -> None:
    chance = random.Random(whom)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(loading.start()) for _ in range(3)]
        wait_for(lambda: bool(loading.calls()), 30, "a load has begun")
        _pause(chance.uniform(0.0, 1.2 * SECONDS))
        for _ in range(3 if whom == "all at intervals" else 1):
            _kill(runtime, whom)
            _pause(chance.uniform(0.0, 0.4))
        for client in clients:
            loading.check(client)
        # The next start is clean, whatever was left: a load, and then a hit.
        assert loading.check(stack.enter_context(loading.start())) in ("miss", "hit")
        assert loading.check(stack.enter_context(loading.start())) == "hit"
    assert len(loading.calls()) <= 5


def _pause(seconds: float) -> None:
    """Lets a chosen time pass: the point of the kill, not a wait for something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.01, end - time.monotonic()) if end > time.monotonic() else 0)


def _kill(runtime: Path, whom: str) -> None:
    found = processes_of(runtime)
    pids = {process.pid for process in found}
    servers = set()
    for process in found:  # before the first is killed: a server's parent is another one then
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() in pids:
                servers.add(process.pid)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            is_server = process.pid in servers
            if whom in ("both", "all at intervals") or is_server == (whom == "server"):
                process.kill()


def test_entries_outlive_a_killed_server(loading: Loading, runtime: Path) -> None:
    with loading.start() as first:
        assert loading.check(first) == "miss"
    for whom in ("server", "keeper", "server"):
        before = {process.pid for process in processes_of(runtime)}
        _kill(runtime, whom)
        wait_for(
            lambda before=before: len({p.pid for p in processes_of(runtime)} - before) == 1,  # type: ignore[misc]
            15,
            f"a new {whom}",
        )
        if whom == "keeper":
            wait_for(lambda: _has_spawned_keeper(runtime), 15, "the new keeper holds the entries")
        with loading.start() as client:
            assert loading.check(client) == "hit"
    assert len(loading.calls()) == 1


def test_live_maps_survive_the_daemon(loading: Loading, runtime: Path) -> None:
    folder = loading.folder
    with loading.start() as first:
        assert loading.check(first) == "miss"
    held, gone = folder / "held", folder / "gone"
    source = f"""
import os, sys, time, overmind
sys.path.insert(0, {str(folder)!r})
import slow
array, number = overmind.load(slow.load, {str(folder / "data")!r}, {SECONDS})
open({str(held)!r}, "w").close()
deadline = time.monotonic() + 30
while not os.path.exists({str(gone)!r}) and time.monotonic() < deadline:
    time.sleep(0.01)
first = int(array.sum())
array += 1
again, _ = overmind.load(slow.load, {str(folder / "data")!r}, {SECONDS})
value = [first, int(array.sum()), int(again.sum())]
"""
    with Process(source) as client:
        wait_for(held.exists, 30, "the client holds its object")
        kill_daemon(runtime)
        gone.touch()
        run = client.result(BOUND)
    assert run.value == [14_000_000, 16_000_000, 14_000_000]
    assert run.outcomes[0] == "hit" and run.outcomes[1] in ("miss", "bypass")


def test_what_a_dead_daemon_left_is_no_obstacle(loading: Loading, runtime: Path) -> None:
    with loading.start() as first:
        assert loading.check(first) == "miss"
    kill_daemon(runtime)
    (instance,) = [path for path in runtime.iterdir() if path.is_dir()]
    left = {path.name for path in instance.iterdir()}
    assert "socket" in left and "lock" in left
    (instance / "pid").write_text("1\n")
    for outcome in ("miss", "hit"):
        with loading.start() as client:
            assert loading.check(client) == outcome
    stop_daemon(runtime)
    (instance / "socket").unlink(missing_ok=True)
    (instance / "socket").write_text("a file where the socket was")
    with loading.start() as client:
        assert loading.check(client) == "miss"
