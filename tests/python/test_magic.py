# SPDX-License-Identifier: MIT
"""%overmind and %%overmind in a real shell against a real daemon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overmind
import pytest
from conftest import processes_of, settle, wait_for
from overmind import records, store


@pytest.fixture
def ip(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shell of this test's own, with Overmind loaded and nothing connected yet."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    InteractiveShell.clear_instance()
    store.reset()
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "overmind")
    yield shell
    overmind.disable()
    store.reset()
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"weights")
    settle(path)
    return path


CELL = """
import overmind, pathlib
got = overmind.load(pathlib.Path.read_bytes, pathlib.Path({path!r}))
len(got)
"""


def line(ip: Any, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What %overmind prints."""
    capsys.readouterr()
    ip.run_line_magic("overmind", text)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.out


def load(path: Path) -> records.LoadRecord:
    """One load, committed; its record."""
    settle(path)
    assert overmind.load(Path.read_bytes, path) == path.read_bytes()
    assert overmind.wait_published(20)
    return overmind.history()[-1]


def test_a_session(ip: Any, file: Path, capsys: pytest.CaptureFixture[str], runtime: Path) -> None:
    """status, start, a miss, a hit, list, stats, why, pin, unpin, drop, stop."""
    assert "no daemon" in line(ip, "status", capsys)
    assert "no daemon" in line(ip, "stats", capsys)
    assert not processes_of(runtime), "looking must not start it"
    assert "running" in line(ip, "start", capsys)
    assert processes_of(runtime)

    first = load(file)
    assert first.outcome == "miss", first.reason
    second = load(file)
    assert second.outcome == "hit", second.reason
    entry = second.entry_id

    assert entry in line(ip, "list", capsys)
    assert str(file.name) in line(ip, "list", capsys).replace("\n", "").replace(" ", "")
    stats = line(ip, "stats", capsys)
    assert "1 hits (50%)" in stats and entry in stats
    why = line(ip, "why 2", capsys).splitlines()
    assert [word for row in why for word in re.findall(r"^(hit|miss|bypass)", row)] == ["hit", "miss"]

    assert f"{entry} pinned" in line(ip, f"pin {entry[:6]}", capsys)
    assert "pinned" in line(ip, "list", capsys)
    assert f"{entry} unpinned" in line(ip, f"unpin {entry}", capsys)
    assert f"{entry} dropped" in line(ip, f"drop {entry}", capsys)
    assert "no entries" in line(ip, "list", capsys)
    assert "stopped" in line(ip, "stop", capsys)
    assert "no daemon was running" in line(ip, "stop", capsys)


def test_drop_all_and_stale(ip: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, changed = tmp_path / "kept", tmp_path / "changed"
    for path in (kept, changed):
        path.write_bytes(path.name.encode())
    kept_id, changed_id = load(kept).entry_id, load(changed).entry_id
    assert kept_id and changed_id
    assert "none is stale" in line(ip, "drop --stale", capsys)
    changed.write_bytes(b"something else")
    dropped = line(ip, "drop --stale", capsys)
    assert changed_id in dropped and "changed" in dropped and kept_id not in dropped
    assert "1 entries dropped" in line(ip, "drop --all", capsys)
    assert "0 entries dropped" in line(ip, "drop --all", capsys)


def test_the_summary(ip: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "overmind is on" in line(ip, "", capsys)
    load(file)
    assert file.name in line(ip, "", capsys).replace("\n", "").replace(" ", "")
    overmind.disable()
    assert "loads are native" in line(ip, "", capsys)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "list extra",
        "why ten",
        "why 1 2",
        "why 0",
        "drop",
        "drop --everything",
        "drop 0123",
        "pin",
        "pin 0123456789abcdef",
        "start --idle-exit",
        "start --idle-exit soon",
        "start --quick 3",
        "monitor forever",
        "list 'unclosed",
    ],
)
def test_misuse_is_a_usage_error(ip: Any, text: str) -> None:
    from IPython.core.error import UsageError

    with pytest.raises(UsageError):
        ip.run_line_magic("overmind", text)


def test_help_names_every_verb(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from overmind.magic import _VERBS

    said = line(ip, "help", capsys)
    assert all(verb in said for verb in _VERBS if verb not in ("summary", "help"))


def test_stats_in_a_notebook_is_html(ip: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(file)
    shown: list[Any] = []
    monkeypatch.setattr("overmind.magic.display", shown.append)
    ip.run_line_magic("overmind", "stats")
    bundle = shown[0]._repr_mimebundle_()
    assert "<table>" in bundle["text/html"] and file.name in bundle["text/html"]


def test_a_cell_shows_what_it_loaded(ip: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = ip.run_cell("%%overmind\n" + CELL.format(path=str(file)))
    assert result.success and result.result == 7
    said = capsys.readouterr().out
    assert re.search(r"^miss ", said, re.M)
    assert ip.user_ns["got"] == b"weights"
    assert overmind.wait_published(20)
    assert ip.run_cell("%%overmind\n" + CELL.format(path=str(file))).success
    said = capsys.readouterr().out
    assert len(re.findall(r"^(hit|miss|bypass) ", said, re.M)) == 1
    assert re.search(r"^hit ", said, re.M)


def test_a_cell_that_loads_nothing(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = ip.run_cell("%%overmind\nx = 3\n!true\nfor i in range(2): x += i\n")
    assert result.success and ip.user_ns["x"] == 4
    assert "loaded nothing" in capsys.readouterr().out


def test_errors_of_a_cell_are_its_own(ip: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = ip.run_cell("%%overmind\n" + CELL.format(path=str(file)) + "\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert re.search(r"^miss ", capsys.readouterr().out, re.M), "what it loaded before is shown"
    result = ip.run_cell("%%overmind\nx = (\n")
    assert isinstance(result.error_in_exec or result.error_before_exec, SyntaxError)


def test_a_cell_magic_takes_no_arguments_and_no_await(ip: Any) -> None:
    from IPython.core.error import UsageError

    assert isinstance(ip.run_cell("%%overmind stats\nx = 1").error_in_exec, UsageError)
    result = ip.run_cell("%%overmind\nimport asyncio\nawait asyncio.sleep(0)")
    assert isinstance(result.error_in_exec, (UsageError, SyntaxError))


def test_braces_in_a_cell_are_not_expanded(ip: Any) -> None:
    ip.run_cell("name = 'expanded'")
    assert ip.run_cell("%%overmind\nout = '{name}' + '$name'").success
    assert ip.user_ns["out"] == "{name}$name"


def test_monitor_shows_a_load(ip: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    from overmind import monitor

    ip.run_line_magic("overmind", "start")
    seen: list[dict[str, Any]] = []
    watching = threading.Event()

    def watch() -> None:
        for event in monitor.events(seconds=15):
            seen.append(event)
            watching.set()
            if event["event"] == "hit":
                return

    thread = threading.Thread(target=watch)
    thread.start()
    assert watching.wait(10)
    # A subscription takes its time to reach the daemon, and what comes before it is not heard: new files until it is.
    number = 0

    def heard() -> bool:
        nonlocal number
        number += 1
        path = file.with_name(f"{number}.bin")
        path.write_bytes(b"weights")
        load(path)
        return "committed" in [event["event"] for event in seen]

    wait_for(heard, 10, "a committed entry in the monitor")
    load(file.with_name(f"{number}.bin"))
    thread.join(20)
    names = [event["event"] for event in seen]
    assert names[0] == "watching", names
    assert names.index("committed") < names.index("hit"), names
    assert str(file.with_name(f"{number}.bin")) in [event.get("target") for event in seen]
    assert "watching" in line(ip, "monitor --seconds 0.3", capsys)


def test_monitor_without_a_daemon(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "overmind:" in line(ip, "monitor --seconds 1", capsys)
