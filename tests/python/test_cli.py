# SPDX-License-Identifier: MIT
"""The `overmind` command as a process: what it prints, as text and as JSON, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import processes_of, wait_for


def overmind(*words: str, expect: int = 0, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "overmind.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if expect == 0 else done.stdout + done.stderr


def as_json(*words: str, expect: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "overmind.cli", *words, "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return json.loads(done.stdout)


LOAD = """
import overmind, pathlib, sys
for name in sys.argv[1:]:
    overmind.load(pathlib.Path.read_bytes, pathlib.Path(name))
assert overmind.wait_published(20)
print(overmind.history()[-1].entry_id)
"""


def load(*paths: Path) -> str:
    """Loads files in a process of their own; the id of the last one's entry."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, paths)], capture_output=True, text=True, timeout=60, check=True
    )
    entry_id = done.stdout.strip()
    assert len(entry_id) == 16, done.stdout + done.stderr
    return entry_id


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"weights")
    return path


def test_life_of_a_daemon(runtime: Path) -> None:
    assert as_json("status", expect=1)["running"] is False
    assert not processes_of(runtime), "looking must not start it"
    started = as_json("start")
    assert started["running"] is True
    assert as_json("start")["daemon_pid"] == started["daemon_pid"]
    status = as_json("status")
    assert status["daemon_pid"] == started["daemon_pid"] and status["entries"] == 0
    assert str(started["daemon_pid"]) in overmind("status")
    assert status["zygotes"] == [] and "no zygotes" in overmind("status")
    assert as_json("stop") == {"stopped": True, "daemon_pid": status["daemon_pid"], "entries": 0, "zygotes": []}
    wait_for(lambda: not processes_of(runtime), 10, "the daemon ends")
    assert as_json("stop") == {"stopped": False, "daemon_pid": None, "entries": 0, "zygotes": []}


def test_a_daemon_that_ends_when_idle(runtime: Path) -> None:
    as_json("start", "--idle-exit", "0.5")
    wait_for(lambda: not processes_of(runtime), 20, "the idle daemon ends")


def test_entries(runtime: Path, file: Path) -> None:
    entry = load(file)
    assert load(file) == entry
    (row,) = as_json("list")
    assert row["id"] == entry and row["hits"] == 1 and row["target"] == str(file)
    assert entry in overmind("list")
    stats = as_json("stats")
    assert stats["store"]["hits"] == 1 and stats["store"]["hit_rate"] == 0.5
    assert [one["id"] for one in stats["entries"]] == [entry]
    assert "process" not in stats
    assert as_json("pin", entry[:8]) == {"id": entry, "pinned": True}
    assert as_json("list")[0]["pinned"] is True
    assert as_json("unpin", entry) == {"id": entry, "pinned": False}
    assert as_json("drop", entry) == {"dropped": 1, "ids": [entry]}
    assert as_json("list") == []


def test_an_entry_found_stale_is_no_hit(runtime: Path, file: Path) -> None:
    load(file)
    file.write_bytes(b"others")
    entry = load(file)
    assert load(file) == entry
    stats = as_json("stats")
    assert (stats["store"]["hits"], stats["store"]["misses"]) == (1, 2)
    assert [row["hits"] for row in stats["entries"]] == [1]


def test_why_knows_the_loads_of_other_processes(runtime: Path, file: Path) -> None:
    load(file)
    load(file)
    rows = as_json("why")
    assert [row["outcome"] for row in rows] == ["hit", "miss"]
    assert rows[1]["reason"] and rows[0]["pid"] != rows[1]["pid"]
    assert len(as_json("why", "1")) == 1
    assert "hit" in overmind("why", "1")


def test_drop_stale_and_all(runtime: Path, tmp_path: Path) -> None:
    kept, changed = tmp_path / "kept", tmp_path / "changed"
    kept.write_bytes(b"kept")
    changed.write_bytes(b"changed")
    stale = load(kept, changed)
    changed.write_bytes(b"something else")
    assert list(as_json("drop", "--stale")["reasons"]) == [stale]
    assert as_json("drop", "--all") == {"dropped": 1}


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["drop"],
        ["drop", "--all", "--stale"],
        ["why", "0"],
        ["start", "--idle-exit", "soon"],
        ["start", "--idle-exit", "nan"],
        ["pin"],
        ["list", "extra"],
        ["pin", "0123456789abcdef"],
        ["drop", "0123"],
    ],
)
def test_misuse_exits_with_2(runtime: Path, words: list[str]) -> None:
    assert "Error" in overmind(*words, expect=2)


def test_the_empty_text_names_no_entry(runtime: Path, file: Path) -> None:
    entry = load(file)
    for words in (["drop", ""], ["pin", ""]):
        assert "no entry ''" in overmind(*words, expect=2)
    assert as_json("drop", entry, entry[:4]) == {"dropped": 1, "ids": [entry]}, "named twice, dropped once"


@pytest.mark.parametrize("words", [["list"], ["why"], ["stats"], ["status"], ["start"], ["doctor"], ["--help"]])
@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_can_not_be_written(runtime: Path, words: list[str], buffered: bool) -> None:
    overmind("start")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *([] if buffered else ["-u"]), "-m", "overmind.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "overmind: can't write the output: No space left on device\n"


def test_a_module_is_missing_for_run(runtime: Path) -> None:
    for program in (["-m", "overmind.cli"], ["-c", "from overmind.launch import main; main()"]):
        done = subprocess.run([sys.executable, *program, "run", "-m"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "argument expected for -m" in done.stderr, done.stderr
        assert "overmind-launch" not in done.stderr


def test_a_runtime_folder_that_is_a_file(runtime: Path, file: Path) -> None:
    env = {"OVERMIND_RUNTIME_DIR": str(file)}
    for verb in ("status", "start", "stop", "list", "stats"):
        said = overmind(verb, expect=1, env=env)
        assert f"{file} is a symlink or not a folder" in said and "the first load starts one" not in said
    assert file.read_bytes() == b"weights"


def test_monitor(runtime: Path, file: Path) -> None:
    overmind("start")
    watcher = subprocess.Popen(
        [sys.executable, "-m", "overmind.cli", "monitor", "--json"], stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    try:
        assert json.loads(watcher.stdout.readline())["event"] == "watching"
        entry = load(file)
        seen = []
        while not seen or seen[-1]["event"] != "committed":
            seen.append(json.loads(watcher.stdout.readline()))
        assert seen[0]["event"] == "lease"
        assert seen[-1]["id"] == entry
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(60) == 0
    finally:
        watcher.kill()
        watcher.wait()
        watcher.stdout.close()


def test_monitor_ends_with_the_daemon_and_after_its_time(runtime: Path) -> None:
    overmind("monitor", expect=1)
    overmind("start")
    assert "watching" in overmind("monitor", "--seconds", "0.3")
    watcher = subprocess.Popen([sys.executable, "-m", "overmind.cli", "monitor"], stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    try:
        assert "watching" in watcher.stdout.readline()
        overmind("stop")
        assert watcher.wait(15) == 0
    finally:
        watcher.kill()
        watcher.wait()
        watcher.stdout.close()


# --- doctor -------------------------------------------------------------------------------------


def check(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["checks"] if one["name"].startswith(name))


def test_a_healthy_machine(runtime: Path) -> None:
    found = as_json("doctor")
    assert found["healthy"] is True
    assert {one["verdict"] for one in found["checks"]} <= {"ok", "note"}
    for name in ("kernel", "memfd", "open files", "memory", "runtime folder", "daemon", "torch", "libraries"):
        assert check(found, name)["found"]
    assert not processes_of(runtime), "doctor must not start it"
    overmind("start")
    assert "process" in check(as_json("doctor"), "daemon")["found"]


def test_a_runtime_folder_open_to_others(runtime: Path) -> None:
    runtime.chmod(0o755)
    found = check(as_json("doctor", expect=1), "runtime folder")
    assert found["verdict"] == "wrong" and "chmod 700" in found["advice"]
    runtime.chmod(0o700)


def test_a_runtime_folder_that_is_a_link(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(runtime)
    monkeypatch.setenv("OVERMIND_RUNTIME_DIR", str(link))
    assert "symbolic link" in check(as_json("doctor", expect=1), "runtime folder")["found"]


def test_bad_settings(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERMIND_BUDGET", "plenty")
    assert "OVERMIND_BUDGET" in check(as_json("doctor", expect=1), "settings")["found"]
    assert "OVERMIND_BUDGET" in overmind("list", expect=1)


def test_limits_are_noted(runtime: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n 512; ulimit -f 1000; exec {sys.executable} -m overmind.cli doctor --json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert check(found, "open files")["verdict"] == "note" and "244 entries" in check(found, "open files")["advice"]
    assert check(found, "file size")["advice"]
