# SPDX-License-Identifier: MIT
"""R05: a socket that everybody can reach, and pickles from whoever connects.

A cache with an abstract or world-writable socket and a pickle protocol runs the code of any local user; one with
predictable paths in /tmp can be led to write through somebody else's symlink, or be fed by somebody else's daemon. The
folder must be the user's own and closed, the peer must be the same user, no message is ever unpickled, and two users
of one installation each have a daemon.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import processes_of, stop_daemon
from processes import OTHER_STRANGER, Process, as_user, hand_over, normal_user, write_module

LOADER = "import numpy\ndef load(path):\n    return [open(path).read(), numpy.full(300_000, 7.0)]\n"

ATTACK = """
import os, pickle, socket, sys
class Harm:
    def __reduce__(self):
        return os.mkdir, ({harm!r},)
data = pickle.dumps({{"op": "hello", "harm": Harm()}})
got = []
for message in (data, b"\\x80", data * 100, len(data).to_bytes(4, "little") + data):
    try:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.settimeout(10)
        s.connect({address!r})
        s.send(message)
        got.append(s.recv(100_000).decode("latin1"))
    except ConnectionError as error:
        got.append("")
    except PermissionError as error:
        got.append("denied")
print(ascii(got))
"""


def source(folder: Path) -> str:
    write_module(folder / "mylib.py", LOADER)
    (folder / "data").write_text("content")
    return f"""
import sys, overmind
sys.path.insert(0, {str(folder)!r})
import mylib
text, array = overmind.load(mylib.load, {str(folder / "data")!r})
value = [text, float(array.sum())]
"""


def socket_of(runtime: Path) -> Path:
    (found,) = runtime.glob("*/socket")
    return found


def attack(folder: Path, runtime: Path, prefix: list[str]) -> list[str]:
    harm = folder / "harm"
    folder.chmod(0o777)
    code = ATTACK.format(harm=str(harm), address=str(socket_of(runtime)))
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not harm.exists(), "a pickle was run"
    return list(eval(done.stdout))


def load(text: str, uid: int, outcome: str) -> None:
    with Process(text, uid=uid) as client:
        run = client.result()
    assert run.value == ["content", 2_100_000.0] and run.outcomes == [outcome], run


def test_the_folder_and_all_in_it_are_closed(folder: Path, runtime: Path) -> None:
    uid = normal_user()
    hand_over(runtime, uid)
    load(source(folder), uid, "miss")
    for path in (runtime, *runtime.rglob("*")):
        info = path.lstat()
        assert info.st_uid == uid and info.st_mode & 0o077 == 0, path
    inet = [c for p in processes_of(runtime) for c in p.net_connections("inet")]
    assert inet == [], "the daemon listens on the network"
    abstract = [line for line in Path("/proc/net/unix").read_text().splitlines() if "@" in line and "overmind" in line]
    assert abstract == []


def test_another_user_is_refused(folder: Path, runtime: Path) -> None:
    """Even with the folder and the socket opened to all, which only the owner could do."""
    uid = normal_user()
    stranger = as_user(OTHER_STRANGER)
    hand_over(runtime, uid)
    text = source(folder)
    load(text, uid, "miss")
    assert attack(folder, runtime, stranger) == ["denied"] * 4
    for path in (runtime, socket_of(runtime).parent):
        path.chmod(0o755)
    socket_of(runtime).chmod(0o777)
    assert attack(folder, runtime, stranger) == [""] * 4, "another user was answered"
    for path in (runtime, socket_of(runtime).parent):
        path.chmod(0o700)
    load(text, uid, "hit")


def test_a_pickle_from_the_same_user_is_not_run(folder: Path, runtime: Path) -> None:
    """Any program of this user can connect: it gets an error or nothing."""
    uid = normal_user()
    hand_over(runtime, uid)
    text = source(folder)
    load(text, uid, "miss")
    for reply in attack(folder, runtime, as_user(uid)):
        assert "harm" not in reply
    load(text, uid, "hit")


@pytest.mark.parametrize("owner", ["other", "root"])
def test_a_runtime_folder_of_another_user(folder: Path, runtime: Path, owner: str) -> None:
    """Somebody made the predictable folder first: nothing is written there, nobody in it is trusted."""
    uid = normal_user()
    as_user(OTHER_STRANGER)
    os.chown(runtime, *((OTHER_STRANGER,) * 2 if owner == "other" else (0, 0)))
    runtime.chmod(0o777)
    with Process(source(folder), uid=uid) as client:
        run = client.result()
    assert run.value == ["content", 2_100_000.0] and run.outcomes == ["bypass"]
    assert str(runtime) in run.reasons[0]
    assert run.stderr.count("overmind:") == 1 and "doctor" in run.stderr
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "start.lock", "log", "socket", "events"])
def test_paths_that_are_symlinks(folder: Path, runtime: Path, name: str) -> None:
    """The daemon's own folder with a planted link: what it points at must keep its content."""
    uid = normal_user()
    hand_over(runtime, uid)
    text = source(folder)
    load(text, uid, "miss")
    (instance,) = [path for path in runtime.iterdir() if path.is_dir()]
    names = {path.name for path in instance.iterdir()}
    stop_daemon(runtime)
    planted = instance / (name if name in names else next(n for n in names if name.split(".")[0] in n))
    victim = folder / "victim"
    victim.write_text("precious")
    hand_over(victim, uid)
    planted.unlink(missing_ok=True)
    planted.symlink_to(victim)
    with Process(text, uid=uid) as client:
        run = client.result()
    assert run.value == ["content", 2_100_000.0]
    assert run.stderr.count("overmind:") <= 1
    assert victim.read_text() == "precious" and victim.stat().st_mode & 0o777 == 0o644
    assert not victim.is_socket()


def test_two_users_of_one_installation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting at all: each has its own folder, daemon and entries."""
    monkeypatch.delenv("OVERMIND_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    users = (normal_user(), OTHER_STRANGER)
    as_user(OTHER_STRANGER)
    folders = [Path(f"/tmp/overmind-{uid}") for uid in users]
    assert not any(path.exists() for path in folders), "a folder of an earlier run"
    text = source(folder)
    try:
        for outcome in ("miss", "hit"):
            for uid in users:
                load(text, uid, outcome)
        for uid, path in zip(users, folders, strict=True):
            assert path.stat().st_uid == uid
            assert {p.uids().effective for p in processes_of(path)} == {uid}
    finally:
        for path in folders:
            stop_daemon(path)
            shutil.rmtree(path, ignore_errors=True)
    assert not [p for path in folders for p in processes_of(path) if p.status() != psutil.STATUS_ZOMBIE]
