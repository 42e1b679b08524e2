# SPDX-License-Identifier: MIT
"""What the machine, the user's limits and other programs can do to the store.

Each time: the load gives what the native load gives, in a bounded time, with at most one warning line that holds the
reason and the fix; nothing that was stored is lost, and other clients keep working.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import processes_of, stop_daemon, wait_for
from fresh import Run
from processes import Process, as_user, forbid, hand_over, kill_daemon, normal_user, write_module

BOUND = 30.0  # seconds for any load here; a native one takes a tenth of a second
LARGE = 1_500_000  # float64: above what is written before the load returns

LOADER = """
import numpy
def load(path, count=1_500_000):
    with open(path) as file:
        return numpy.full(count, float(file.read()))
"""

LOAD = """
import sys, overmind
sys.path.insert(0, {folder!r})
import mylib
array = overmind.load(mylib.load, {folder!r} + "/data")
value = [len(array), float(array.sum())]
{after}
"""
RIGHT = [LARGE, 2.0 * LARGE]


@pytest.fixture
def source(folder: Path, runtime: Path) -> str:
    write_module(folder / "mylib.py", LOADER)
    (folder / "data").write_text("2")
    return LOAD.format(folder=str(folder), after="")


def native(run: Run, reason: str = "") -> None:
    """The load was native, and the user was told so in one line at most."""
    assert run.value == RIGHT
    assert run.outcomes == ["bypass"], run
    assert run.reasons[0] and reason in run.reasons[0], run.reasons
    assert run.stderr.count("overmind:") <= 1, run.stderr
    assert "Traceback" not in run.stderr, run.stderr


def one_warning(run: Run) -> None:
    lines = [line for line in run.stderr.splitlines() if "overmind" in line]
    assert len(lines) == 1 and "doctor" in lines[0], run.stderr


def load(source: str, **options: object) -> Run:
    begun = time.monotonic()
    with Process(source, **options) as process:  # type: ignore[arg-type]
        run = process.result(BOUND)
    assert time.monotonic() - begun < BOUND
    return run


def two_loads(folder: Path) -> str:
    """A second load, of another key, in the same process: the warning must not come again."""
    (folder / "data2").write_text("3")
    return LOAD.format(
        folder=str(folder), after='assert float(overmind.load(mylib.load, sys.path[0] + "/data2")[0]) == 3.0'
    )


# --- no memfd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM", "ENOMEM", "EMFILE"])
def test_no_memfd_anywhere(source: str, folder: Path, runtime: Path, error: str) -> None:
    """An old kernel, or a sandbox: the client and the daemon that it starts have no memfd_create."""
    run = load(two_loads(folder), prepare=lambda: forbid("memfd_create", getattr(errno, error)))
    assert run.value == RIGHT
    assert set(run.outcomes) == {"bypass"} and all("memfd" in reason for reason in run.reasons), run.reasons
    assert run.stderr.count("overmind:") <= 1 and "Traceback" not in run.stderr, run.stderr


def test_no_memfd_in_one_client(source: str, runtime: Path) -> None:
    """It can still read what others stored."""
    assert load(source).outcomes == ["miss"]
    run = load(source, prepare=lambda: forbid("memfd_create", errno.ENOSYS))
    assert run.value == RIGHT and run.outcomes == ["hit"]


# --- full memory --------------------------------------------------------------------------------


def test_an_object_larger_than_the_budget(source: str, runtime: Path) -> None:
    tiny = {"OVERMIND_BUDGET": "5MB"}
    for _ in range(2):
        native(load(source, env=tiny), "budget")


def test_what_is_stored_stays_when_something_does_not_fit(source: str, folder: Path, runtime: Path) -> None:
    """Twenty MB of budget: one entry of 12 MB, then an object of 80 MB that can't be kept."""
    environment = {"OVERMIND_BUDGET": "20MB"}
    assert load(source, env=environment).outcomes == ["miss"]
    big = source.replace('"/data")', '"/data", 10_000_000)')
    run = load(big, env=environment)
    assert run.value == [10_000_000, 2e7] and run.outcomes == ["bypass"] and "budget" in run.reasons[0]
    assert load(source, env=environment).outcomes == ["hit"]


WRONG = [
    ("OVERMIND_BUDGET", "lots", "16GiB"),
    ("OVERMIND_LOG", "loud", "warning"),
    ("OVERMIND_RUNTIME_DIR", "over/mind", "an absolute path"),
    ("OVERMIND_ZYGOTE", "foo", "0 (every start is a plain one) or 1"),
    ("OVERMIND_DISABLE", "perhaps", "1 (off) or 0"),
]


@pytest.mark.parametrize("loads", ["overmind.load", "a loader"])
@pytest.mark.parametrize(("name", "value", "form"), WRONG)
def test_a_variable_with_a_wrong_value(
    source: str, folder: Path, runtime: Path, loads: str, name: str, value: str, form: str
) -> None:
    """Every load says so in its record; one line says so to whoever looks at the screen."""
    if loads == "a loader":
        safetensors = f"""
from safetensors.numpy import save_file
import numpy, safetensors.torch
path = {str(folder / "w.safetensors")!r}
save_file({{"w": numpy.full({LARGE}, 2.0)}}, path)
w = safetensors.torch.load_file(path)["w"]
value = [len(w), float(w.sum())]
"""
        source = safetensors
    run = load(source, env={name: value})
    native(run, f"{name}")
    assert form in run.reasons[0] and value in run.reasons[0]
    one_warning(run)
    assert name in run.stderr and form in run.stderr


def test_a_wrong_value_that_is_put_right_in_the_process(source: str, runtime: Path) -> None:
    run = load(
        f"""
import os
from overmind import store
os.environ["OVERMIND_BUDGET"] = "lots"
{source}
os.environ["OVERMIND_BUDGET"] = "1GiB"
store.reset()  # or half a minute passes
array = overmind.load(mylib.load, sys.path[0] + "/data")
"""
    )
    assert run.value == RIGHT and run.outcomes == ["bypass", "miss"], run


# --- limits of the client and of the shell that starts the daemon -------------------------------


def limit(what: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (value, value))


def test_address_space_of_the_client(source: str, runtime: Path) -> None:
    """A map that does not fit is a native load; a native load that does not fit is the native error."""
    with Process("import numpy\nvalue = int(open('/proc/self/statm').read().split()[0]) * 4096", on=False) as process:
        base = int(process.result().value)
    big = source.replace('"/data")', '"/data", 40_000_000)')  # 320 MB
    assert load(big).outcomes == ["miss"]
    run = load(big, prepare=limit(resource.RLIMIT_AS, base + 700_000_000))
    assert run.value == [40_000_000, 8e7] and run.outcomes[0] in ("hit", "bypass")
    with Process(big, prepare=limit(resource.RLIMIT_AS, base + 250_000_000)) as process:
        failed = process.result(BOUND, check=False)
    with Process(
        big.replace("overmind.load(mylib.load, ", "mylib.load("),
        on=False,
        prepare=limit(resource.RLIMIT_AS, base + 250_000_000),
    ) as process:
        expected = process.result(BOUND, check=False)
    assert failed.returncode == expected.returncode == 1
    assert "MemoryError" in expected.stderr.splitlines()[-1] and "MemoryError" in failed.stderr.splitlines()[-1]


LIMITS = [
    ("AS", 8 << 30),
    ("AS", 2 << 30),
    ("FSIZE", 0),
    ("FSIZE", 1 << 20),
    ("NOFILE", 24),
    ("NPROC", 1),
    ("STACK", 256 << 10),
]


@pytest.mark.parametrize(("what", "value"), LIMITS)
def test_limits_of_the_shell_that_starts_everything(source: str, runtime: Path, what: str, value: int) -> None:
    """The limits go over to the daemon that is started there. Works, or a reason; never a signal, never a hang."""
    uid = normal_user() if what == "NPROC" else None
    env = {"OPENBLAS_NUM_THREADS": "1"}  # natively numpy ends the process when it can't have its threads
    if uid is not None:
        hand_over(runtime, uid)
    for _ in range(2):
        with Process(source, uid=uid, env=env, prepare=limit(getattr(resource, f"RLIMIT_{what}"), value)) as process:
            _check_limited(process, what)
    # Whatever the daemon could not do there, a client without the limits works, if need be natively.
    run = load(source, uid=uid)
    assert run.value == RIGHT
    assert run.stderr.count("overmind:") <= 1 and "Traceback" not in run.stderr


def _check_limited(process: Process, what: str) -> None:
    # Its output goes to files, which FSIZE=0 forbids: only its end can be seen.
    run = process.result(BOUND, check=False)
    assert run.returncode >= 0, f"killed by signal {-run.returncode}"
    if what == "FSIZE":
        return
    assert run.returncode == 0 or "not committed" in run.stderr, process.output()
    if run.returncode == 0:
        assert run.value == RIGHT
        assert run.outcomes[0] != "bypass" or run.reasons[0]
    assert run.stderr.count("overmind:") <= 1 and run.stderr.count("Traceback") == int(run.returncode != 0)


@pytest.mark.parametrize(("what", "value"), [("FSIZE", 1 << 20), ("NOFILE", 24)])
def test_limits_of_one_client_of_a_healthy_daemon(source: str, runtime: Path, what: str, value: int) -> None:
    other = source.replace('"/data")', '"/data", 1_400_000)')
    assert load(source).outcomes == ["miss"]
    limited = limit(getattr(resource, f"RLIMIT_{what}"), value)
    with Process(source, prepare=limited) as process:
        run = process.result(BOUND)
    assert run.value == RIGHT and run.outcomes == ["hit"]
    # Publishing 11 MB may fail there; the load does not, and the key is free for the next.
    with Process(
        other + "\nimport os\nos._exit(0 if value == [1_400_000, 2_800_000.0] else 3)", prepare=limited
    ) as process:
        assert process.result(BOUND).returncode == 0
    assert load(other).outcomes[0] in ("hit", "miss")
    assert load(other).outcomes == ["hit"]


# --- the runtime folder -------------------------------------------------------------------------


def test_a_runtime_folder_that_cannot_be_written(source: str, folder: Path, runtime: Path) -> None:
    hand_over(runtime, normal_user())
    runtime.chmod(0o500)
    run = load(source, uid=normal_user())
    native(run)
    one_warning(run)
    runtime.chmod(0o700)


def test_a_runtime_folder_that_cannot_be_made(source: str, folder: Path, runtime: Path) -> None:
    run = load(two_loads(folder), env={"OVERMIND_RUNTIME_DIR": "/proc/nowhere"})
    assert run.value == RIGHT and run.outcomes == ["bypass"] * 2
    one_warning(run)


def test_a_runtime_folder_with_a_name_too_long_for_a_socket(source: str, folder: Path, runtime: Path) -> None:
    deep = runtime / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    run = load(source, env={"OVERMIND_RUNTIME_DIR": str(deep)})
    native(run, "at most 90 characters")
    one_warning(run)
    assert "OVERMIND_RUNTIME_DIR" in run.stderr and "at most 90 characters" in run.stderr


@pytest.mark.parametrize("what", ["link", "file", "open to others", "foreign"])
def test_a_runtime_folder_that_is_not_the_users_own(source: str, folder: Path, runtime: Path, what: str) -> None:
    path = folder / "runtime"
    uid = normal_user() if what == "foreign" else None
    if what == "link":
        path.symlink_to(runtime)
    elif what == "file":
        path.write_text("")
    else:
        path.mkdir(mode=0o700)
        path.chmod(0o777 if what == "open to others" else 0o700)
    run = load(source, uid=uid, env={"OVERMIND_RUNTIME_DIR": str(path)})
    native(run)
    one_warning(run)
    assert str(path) in run.stderr
    assert not processes_of(path) and list(runtime.iterdir()) == []


def test_a_runtime_folder_removed_under_a_running_daemon(source: str, runtime: Path) -> None:
    """A cleaner of /tmp: the daemon can't be reached any more, a new one is started."""
    assert load(source).outcomes == ["miss"]
    subprocess.run(["rm", "-rf", str(runtime)], check=True)  # the daemon removes its files meanwhile, too
    runtime.mkdir(mode=0o700)
    run = load(source)
    assert run.value == RIGHT and run.outcomes[0] in ("miss", "bypass")


BROKEN = """
from overmind import store
real = store.config
def config():
    found = real()
    found.daemon_path = {daemon!r}
    return found
store.config = config
"""


@pytest.mark.parametrize("daemon", ["", "/bin/false", "/bin/true", "/bin/cat", "/nonexistent/overmindd"])
def test_a_daemon_that_does_not_start(source: str, runtime: Path, daemon: str) -> None:
    broken = BROKEN.format(daemon=daemon)
    run = load(broken + source)
    native(run)
    one_warning(run)


# --- files of others ----------------------------------------------------------------------------


def test_stale_files_of_a_dead_daemon(source: str, runtime: Path) -> None:
    assert load(source).outcomes == ["miss"]
    kill_daemon(runtime)
    assert list(runtime.glob("*/socket")), "a killed daemon leaves its socket"
    run = load(source)
    assert run.value == RIGHT and run.outcomes == ["miss"] and "overmind:" not in run.stderr
    assert load(source).outcomes == ["hit"]


def test_a_daemon_of_another_version_beside(source: str, runtime: Path) -> None:
    """Two installations: the old daemon keeps serving its clients, the new one has its own folder."""
    assert load(source).outcomes == ["miss"]
    (mine,) = [path for path in runtime.iterdir() if path.is_dir()]
    other = runtime / "v0.0.1-p0"
    other.mkdir(mode=0o700)
    served: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(other / "socket"))
        listener.listen()
        listener.settimeout(10)
        (other / "lock").write_text("")
        stop_daemon(runtime)
        assert load(source).outcomes == ["miss"]
        assert load(source).outcomes == ["hit"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as old_client:
            old_client.connect(str(other / "socket"))
            connection, _address = listener.accept()
            with connection:
                old_client.send(b"still there")
                served.append(connection.recv(100))
    assert served == [b"still there"]
    assert {path.name for path in runtime.iterdir() if path.is_dir()} == {mine.name, "v0.0.1-p0"}
    assert (other / "lock").exists() and (other / "socket").is_socket()


@pytest.mark.parametrize("answer", ["silence", "garbage", "close"])
def test_something_else_answers_on_the_socket(source: str, folder: Path, runtime: Path, answer: str) -> None:
    """A program of the same user sits there, holding the lock as a daemon would, and never gives a sensible answer."""
    assert load(source).outcomes == ["miss"]
    (instance,) = [path for path in runtime.iterdir() if path.is_dir()]
    stop_daemon(runtime)
    impostor = f"""
import fcntl, os, socket
lock = open({str(instance / "lock")!r}, "a")
fcntl.flock(lock, fcntl.LOCK_EX)
path = {str(instance / "socket")!r}
if os.path.exists(path):
    os.unlink(path)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(path)
s.listen(20)
open({str(folder / "ready")!r}, "w").close()
kept = []
while True:
    c, _ = s.accept()
    if {answer!r} == "garbage":
        c.send(os.urandom(1000))
    if {answer!r} != "close":
        kept.append(c)
    else:
        c.close()
"""
    with Process(impostor, on=False):
        wait_for((folder / "ready").exists, 20, "the impostor listens")
        run = load(two_loads(folder))
        assert run.value == RIGHT and set(run.outcomes) == {"bypass"}, run
        assert run.stderr.count("overmind:") == 1, run.stderr


# --- garbage on the socket ----------------------------------------------------------------------


def connect(runtime: Path) -> socket.socket:
    (path,) = runtime.glob("*/socket")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def cbor_messages(chance: random.Random) -> list[bytes]:
    """Bytes that look like messages: maps with right and wrong names, deep nesting, impossible lengths."""
    op = b"\xa1\x62op"
    return [
        b"",
        op + b"\x65hello",
        op + b"\x66lookup",
        op + b"\x64stop\x00",
        op + b"\x7b\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xbb\x7f\xff\xff\xff\xff\xff\xff\xff" + op,
        b"\x9f" * 60_000,
        b"\xa1\x61a" * 20_000,
        b"\x5b\x00\x00\x00\xff\xff\xff\xff\xff",
        b"\xff" * 65_536,
        *(chance.randbytes(chance.randrange(1, 4000)) for _ in range(40)),
    ]


def test_garbage_does_not_reach_other_clients(source: str, runtime: Path) -> None:
    assert load(source).outcomes == ["miss"]
    before = {process.pid for process in processes_of(runtime)}
    chance = random.Random(1)
    for message in cbor_messages(chance):
        with connect(runtime) as connection:
            try:
                connection.send(message)
                connection.recv(100_000)
            except (ConnectionError, BrokenPipeError):
                continue
            except TimeoutError:
                assert message == b"", f"no answer and no end for {message[:20]!r}"
    assert load(source).outcomes == ["hit"]
    assert {process.pid for process in processes_of(runtime)} == before, "garbage ended the daemon"


def test_huge_messages_many_descriptors_and_half_messages(source: str, runtime: Path) -> None:
    assert load(source).outcomes == ["miss"]
    before = {process.pid for process in processes_of(runtime)}
    with connect(runtime) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        try:
            connection.send(b"\xa1" * 100_000)
            assert connection.recv(100) == b""
        except OSError as error:
            assert error.errno in (errno.EMSGSIZE, errno.ECONNRESET, errno.EPIPE), error
    servers = {process.pid: len(os.listdir(f"/proc/{process.pid}/fd")) for process in processes_of(runtime)}
    for _ in range(20):
        with connect(runtime) as connection:
            socket.send_fds(connection, [b"\xa1\x62op\x65hello"], [0] * 100)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wrong_kind, pytest.raises(OSError):
        wrong_kind.connect(str(next(runtime.glob("*/socket"))))
    assert load(source).outcomes == ["hit"]
    wait_for(
        lambda: all(len(os.listdir(f"/proc/{pid}/fd")) <= count + 1 for pid, count in servers.items()),
        15,
        "the descriptors that came with garbage are closed",
    )
    assert {process.pid for process in processes_of(runtime)} == before


def test_many_connections_that_say_nothing(source: str, runtime: Path) -> None:
    """More than the daemon takes: those that wait in line are served again once the others are gone."""
    assert load(source).outcomes == ["miss"]
    code = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = []
for _ in range(1500):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.setblocking(False)
    try:
        s.connect(sys.argv[1])
    except OSError:
        break
    kept.append(s)
print(len(kept), flush=True)
sys.stdin.read()
"""
    (path,) = runtime.glob("*/socket")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as crowd:
        try:
            assert crowd.stdout is not None
            assert int(crowd.stdout.readline()) > 50
            run = load(source)
            assert run.value == RIGHT and run.stderr.count("overmind:") <= 1
        finally:
            crowd.kill()
    wait_for(lambda: load(source).outcomes == ["hit"], 30, "the daemon serves again")


def test_a_stopped_daemon_stops_nobody(source: str, folder: Path, runtime: Path) -> None:
    """SIGSTOP: it is there, it holds the lock, it does not answer. Every wait has a deadline."""
    import signal

    assert load(source).outcomes == ["miss"]
    for process in processes_of(runtime):
        process.send_signal(signal.SIGSTOP)
    try:
        run = load(two_loads(folder))
        assert run.value == RIGHT and set(run.outcomes) == {"bypass"}
        assert run.stderr.count("overmind:") == 1, run.stderr
    finally:
        for process in processes_of(runtime):
            process.send_signal(signal.SIGCONT)
    assert load(source).outcomes == ["hit"], "nothing is lost"


STOPPED = """
import os, signal, time
from overmind import store
daemon = store.client().stats()["daemon_pid"]
os.kill(daemon, signal.SIGSTOP)
begun = time.monotonic()
try:
    for _ in range(4):
        array = overmind.load(mylib.load, sys.path[0] + "/data")
    taken = time.monotonic() - begun
finally:
    os.kill(daemon, signal.SIGCONT)
assert taken < 10, taken
value = [len(array), float(array.sum())]
"""


def test_a_daemon_that_stops_is_waited_for_once(source: str, folder: Path, runtime: Path) -> None:
    """The deadline of a question is 5 s: not one for each of the loads that follow."""
    assert load(source).outcomes == ["miss"]
    run = load(LOAD.format(folder=str(folder), after=STOPPED))
    assert run.value == RIGHT and run.outcomes == ["hit"] + ["bypass"] * 4
    assert run.stderr.count("overmind:") == 1, run.stderr


AGAIN = """
import time
store._RETRY_AFTER = 1.0
deadline = time.monotonic() + BOUND
while overmind.history()[-1].outcome != "hit" and time.monotonic() < deadline:
    overmind.load(mylib.load, sys.path[0] + "/data")
    time.sleep(0.1)
"""


def test_a_daemon_that_goes_on_is_used_again(source: str, folder: Path, runtime: Path) -> None:
    """However often is loaded meanwhile: the time until it is tried again begins once."""
    assert load(source).outcomes == ["miss"]
    run = load(LOAD.format(folder=str(folder), after=STOPPED + AGAIN.replace("BOUND", str(BOUND))))
    assert run.outcomes[-1] == "hit" and run.outcomes.count("hit") == 2, run.outcomes


def test_users_without_rights_get_a_reason(source: str, runtime: Path) -> None:
    """A daemon of root, a client that is nobody: its own error, not the other's objects."""
    as_user(normal_user())
    assert load(source).outcomes == ["miss"]
    if os.getuid() != normal_user():
        run = load(source, uid=normal_user())
        native(run)
        one_warning(run)
