# SPDX-License-Identifier: MIT
"""The life of the daemon: started by whoever needs it, part of nobody, ended by choice, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import Oracle, processes_of, wait_for
from private_store import connect
from processes import Process, write_module

LOADER = """
import numpy
def load(path, count=300_000):
    with open(path) as file:
        return numpy.full(count, float(file.read()))
"""

LOAD = """
import sys, overmind
sys.path.insert(0, {folder!r})
import mylib
value = float(overmind.load(mylib.load, {folder!r} + "/data").sum())
"""


@pytest.fixture
def source(folder: Path, runtime: Path) -> str:
    write_module(folder / "mylib.py", LOADER)
    (folder / "data").write_text("2")
    return LOAD.format(folder=str(folder))


def run(source: str, **options: object) -> list[str]:
    with Process(source, **options) as process:  # type: ignore[arg-type]
        done = process.result()
    assert done.value == 600_000.0
    return done.outcomes


WAITING = """
import sys, time, pathlib, overmind
sys.path.insert(0, {folder!r})
import mylib
pathlib.Path({folder!r}, sys.argv[1]).touch()
overmind.load(mylib.slow, {folder!r} + "/data")
"""
SLOW = """
import pathlib, time
def slow(path):
    folder = pathlib.Path(path).parent
    (folder / "loading").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return pathlib.Path(path).read_text()
"""


def test_who_waits_for_another_s_load_writes_nothing_to_a_pipe(folder: Path, runtime: Path) -> None:
    """The bar is for terminals and notebooks."""
    write_module(folder / "mylib.py", SLOW)
    (folder / "data").write_text("2")
    program = WAITING.format(folder=str(folder))
    command = [sys.executable, "-c", program]
    with subprocess.Popen([*command, "one"], stdout=subprocess.PIPE) as one:
        wait_for((folder / "loading").exists, 60, "the first one loads")
        with subprocess.Popen([*command, "two"], stdout=subprocess.PIPE) as two:
            wait_for((folder / "two").exists, 60, "the second one begins")
            begun = (folder / "two").stat().st_mtime
            wait_for(lambda: time.time() - begun > 1.5, 60, "a terminal would have its bar by now")
            (folder / "go").touch()
            assert (one.communicate(timeout=60)[0], two.communicate(timeout=60)[0]) == (b"", b"")
    assert (one.returncode, two.returncode) == (0, 0)


def test_a_script_whose_output_is_captured_ends_when_it_ends(source: str, runtime: Path) -> None:
    """The pipe of the script must not be held open by the daemon or a snapshot child that it started."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", source + "\nprint(value)"],
        capture_output=True,
        text=True,
        stdin=subprocess.PIPE,
        timeout=60,
    )
    assert done.stdout == "600000.0\n", done
    assert time.monotonic() - begun < 30
    assert processes_of(runtime), "the daemon lives on"
    shell = subprocess.run(f"{sys.executable} -c '{source}' | cat", shell=True, capture_output=True, timeout=60)
    assert shell.returncode == 0


def test_its_session_folder_and_descriptors_are_its_own(source: str, runtime: Path, folder: Path) -> None:
    held = os.open(folder / "data", os.O_RDONLY)
    os.set_inheritable(held, True)
    (folder / "open").write_text("")
    opened = f"import os\nheld = open({str(folder / 'open')!r})\nos.set_inheritable(held.fileno(), True)\n"
    try:
        with Process(opened + source, cwd=str(folder)) as process:
            process.result()
    finally:
        os.close(held)
    found = processes_of(runtime)
    assert len(found) == 2, "a keeper and a server"
    for process in found:
        assert os.getsid(process.pid) != os.getsid(0)
        assert process.cwd() == "/" and process.terminal() is None
        for fd in os.listdir(f"/proc/{process.pid}/fd"):
            target = os.readlink(f"/proc/{process.pid}/fd/{fd}")
            own = (
                "/dev/null",
                "/memfd:",
                "socket:",
                "anon_inode:",
                "/proc/pressure",
                "/proc/self",
                str(runtime),
                "/dev/urandom",
            )
            assert target.startswith(own), f"{process.pid} holds {target}"
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "\nUmask:\t0077" in status


def test_signals_to_the_group_of_the_starter_do_not_reach_it(source: str, runtime: Path) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
        waiting = source + "\nimport time\nprint('loaded', flush=True)\ntime.sleep(60)\n"
        with subprocess.Popen(
            [sys.executable, "-c", waiting],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as starter:
            try:
                assert starter.stdout is not None and starter.stdout.readline() == "loaded\n"
                before = {process.pid for process in processes_of(runtime)}
                assert len(before) == 2
                os.killpg(starter.pid, number)
                starter.wait(60)
            finally:
                starter.kill()
        assert {process.pid for process in processes_of(runtime)} == before
    assert run(source) == ["hit"]
    for process in processes_of(runtime):
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            process.send_signal(number)
    assert run(source) == ["hit"]


def test_the_starter_is_not_its_parent(source: str, runtime: Path) -> None:
    """No zombie in the user's process and no SIGCHLD: `os.wait()` there finds no child."""
    own = """
import os, signal
seen = []
signal.signal(signal.SIGCHLD, lambda *a: seen.append(a[0]))
"""
    after = """
try:
    os.waitpid(-1, os.WNOHANG)
    value = "a child"
except ChildProcessError:
    value = "no child"
assert overmind.wait_published(60)
value = [value, [p for p in os.listdir("/proc") if p.isdigit() and _state(p) == ("Z", os.getpid())]]
"""
    state = """
def _state(pid):
    try:
        fields = open("/proc/%s/stat" % pid).read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])
"""
    with Process(own + state + source.replace("mylib.load, ", "mylib.load, count=3_000_000, path=") + after) as process:
        assert process.result().value == ["no child", []]


def test_stop_leaves_nothing(source: str, runtime: Path) -> None:
    assert run(source) == ["miss"]
    with Process("from overmind import store\nstore.client().stop()\nvalue = 1", on=False) as process:
        process.result()
    wait_for(lambda: not processes_of(runtime), 10, "keeper and server have ended")
    left = [path for path in runtime.rglob("*") if path.is_socket()]
    assert left == [], "a socket of a daemon that stopped"
    assert run(source) == ["miss"]


def test_idle_exit_by_choice(source: str, runtime: Path) -> None:
    from overmind import store

    program = store.config().daemon_path
    subprocess.run([program, f"--runtime-dir={runtime}", "--idle-exit=1"], check=True, capture_output=True, timeout=20)
    holding = source + "\nimport time\nprint('loaded', flush=True)\ntime.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None and client.stdout.readline() == "loaded\n"
            began = time.monotonic()
            wait_for(lambda: not processes_of(runtime) or time.monotonic() - began > 2.5, 20, "2.5 s with a client")
            assert processes_of(runtime), "it ended while a client was connected"
        finally:
            client.kill()
    wait_for(lambda: not processes_of(runtime), 15, "it has ended by itself")


@pytest.mark.parametrize("count", [1_000, 30_000_000])
def test_killed_right_after_the_load_the_entry_is_committed(source: str, runtime: Path, count: int) -> None:
    """240 MB is published by a child that outlives its kernel; a small one is written before the load returns."""
    load = source.replace('"/data")', f'"/data", {count})')
    killed = load + "\nimport os, signal\nos.killpg(0, signal.SIGKILL)\n"
    with Process(killed, isolated=True) as victim:
        assert victim.result(check=False).returncode == -signal.SIGKILL
    # Before that a second process may find a native load sooner.
    wait_for(lambda: len(connect(runtime, start=False).list()) == 1, 60, "it is committed")
    with Process(load) as process:
        done = process.result()
    assert done.value == 2.0 * count and done.outcomes == ["hit"]


def test_wait_published(source: str, runtime: Path) -> None:
    load = source.replace('"/data")', '"/data", 10_000_000)')
    check = """
from overmind import store
assert overmind.wait_published(60) is True
assert overmind.wait_published() is True
(entry,) = store.client().list()
value = [entry["id"] == overmind.history()[0].entry_id, entry["nbytes"] >= 80_000_000]
"""
    with Process(load + check) as process:
        assert process.result().value == [True, True]


def test_eviction_keeps_live_maps_valid(source: str, runtime: Path, folder: Path) -> None:
    """Four entries of 40 MB in 100 MB: the oldest go, what they mapped stays, the figures are right."""
    for number in range(4):
        (folder / f"data{number}").write_text(str(number + 1))
    text = f"""
import sys, overmind
sys.path.insert(0, {str(folder)!r})
import mylib
from overmind import store
def load(number):
    return overmind.load(mylib.load, {str(folder)!r} + "/data%d" % number, 5_000_000)
load(0)
assert overmind.wait_published(60)
held = load(0)
value = [overmind.history()[-1].outcome]
for number in (1, 2, 3):
    load(number)
    assert overmind.wait_published(60)
    assert store.client().stats()["used"] <= 100_000_000
stats = store.client().stats()
value += [stats["evicted"] >= 1, stats["entries"] <= 2, float(held.sum())]
held += 1
value += [float(held.sum()), float(load(0).sum()), float(load(3).sum()), overmind.history()[-1].outcome]
"""
    with Process(text, env={"OVERMIND_BUDGET": "100MB"}) as process:
        done = process.result()
    assert done.value == ["hit", True, True, 5e6, 1e7, 5e6, 2e7, "hit"]


def test_fifty_rounds_leave_no_map_and_no_descriptor(source: str, runtime: Path) -> None:
    rounds = """
import gc, os, resource
def counts():
    gc.collect()
    return [len(open("/proc/self/maps").readlines()), len(os.listdir("/proc/self/fd"))]
assert overmind.wait_published(60)
def once():
    return float(overmind.load(mylib.load, sys.path[0] + "/data").sum())
for _ in range(3):
    once()
before = counts()
size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(50):
    assert once() == 600_000.0
after = counts()
value = [after[0] - before[0], after[1] - before[1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < 20_000]
"""
    with Process(source + rounds) as process:
        done = process.result()
    assert done.value[0] <= 2 and done.value[1:] == [0, True], done.value
    assert done.outcomes[1:] == ["hit"] * 53
    servers = [len(os.listdir(f"/proc/{process.pid}/fd")) for process in processes_of(runtime)]
    assert max(servers) < 40


def test_a_subprocess_of_user_code_gets_no_descriptor(source: str, runtime: Path) -> None:
    look = """
import os, subprocess
held = [overmind.load(mylib.load, sys.path[0] + "/data", 5_000_000) for _ in range(3)]
code = '''
import os
for fd in os.listdir("/proc/self/fd"):
    try: print(os.readlink("/proc/self/fd/" + fd))
    except OSError: pass
'''
def child(start):
    return sorted(set(start([sys.executable, "-S", "-E", "-c", code])))
def inheriting(command):
    return subprocess.run(command, close_fds=False, capture_output=True, text=True).stdout.split()
def forked(command):
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1)
        os.execv(command[0], command)
    os.close(write)
    with os.fdopen(read) as file:
        got = file.read().split()
    os.wait()
    return got
value = [[line for line in child(start) if "memfd" in line or "socket" in line] for start in (inheriting, forked)]
"""
    with Process(source + look) as process:
        assert process.result().value == [[], []]


def test_the_first_start_by_eight_at_once_makes_one_daemon(source: str, runtime: Path) -> None:
    clients = [Process(source) for _ in range(8)]
    try:
        outcomes = sorted(client.result().outcomes[0] for client in clients)
    finally:
        for client in clients:
            client.__exit__()
    assert outcomes == ["hit"] * 7 + ["miss"]
    assert len(processes_of(runtime)) == 2


def test_a_hit_needs_no_second_daemon_after_a_restart_of_the_kernel(oracle: Oracle, source: str, runtime: Path) -> None:
    """The daemon of the first kernel serves the second; it has not been started again."""
    assert oracle.run(source).outcomes == ["miss"]
    before = {process.pid: process.create_time() for process in processes_of(runtime)}
    assert oracle.run(source).outcomes == ["hit"]
    assert {process.pid: process.create_time() for process in processes_of(runtime)} == before
    assert psutil.pid_exists(next(iter(before)))
