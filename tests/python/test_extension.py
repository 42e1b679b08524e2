# SPDX-License-Identifier: MIT
"""On and off: enable() and disable(), %load_ext, %unload_ext and %reload_ext in a real IPython shell."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overmind
import pytest
from fresh import Fresh
from overmind import extension, store


@pytest.fixture
def ip(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shell of this test's own, with its profile in a temporary folder."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    yield shell
    overmind.disable()
    store.reset()
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


def magics(ip: Any) -> dict[str, set[str]]:
    return {kind: set(found) for kind, found in ip.magics_manager.magics.items()}


def test_load_and_unload_leave_nothing(ip: Any) -> None:
    ip.run_line_magic("unload_ext", "overmind")  # brings in IPython's own magics for extensions
    before = magics(ip), list(sys.meta_path), set(ip.magics_manager.registry)
    assert ip.run_line_magic("load_ext", "overmind") is None
    assert extension.enabled()
    assert "overmind" in ip.magics_manager.magics["line"] and "overmind" in ip.magics_manager.magics["cell"]
    ip.run_line_magic("unload_ext", "overmind")
    assert not extension.enabled()
    assert (magics(ip), list(sys.meta_path), set(ip.magics_manager.registry)) == before
    ip.run_line_magic("load_ext", "overmind")
    assert extension.enabled()


def test_unload_without_load_is_harmless(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = magics(ip)
    ip.run_line_magic("unload_ext", "overmind")
    overmind.unload_ipython_extension(ip)
    overmind.unload_ipython_extension(ip)
    assert magics(ip) == before
    assert "Traceback" not in capsys.readouterr().err


def test_reload(ip: Any) -> None:
    ip.run_line_magic("load_ext", "overmind")
    ip.run_line_magic("reload_ext", "overmind")
    assert extension.enabled()
    assert "overmind" in ip.magics_manager.magics["line"]
    function = overmind.load
    importlib.import_module("overmind.load")
    assert overmind.load is function, "the module must not take the function's place"
    ip.run_line_magic("unload_ext", "overmind")
    assert not extension.enabled()
    assert "overmind" not in ip.magics_manager.magics["line"]


def test_loading_starts_no_daemon(ip: Any, runtime: Path) -> None:
    ip.run_line_magic("load_ext", "overmind")
    assert list(runtime.iterdir()) == []


def test_a_magic_of_the_same_name_that_came_later_is_kept(ip: Any) -> None:
    ip.run_line_magic("load_ext", "overmind")

    def theirs(line: str) -> str:
        return line

    ip.register_magic_function(theirs, "line", "overmind")
    ip.run_line_magic("unload_ext", "overmind")
    assert ip.magics_manager.magics["line"]["overmind"] is theirs


def test_bad_settings_do_not_fail_the_first_cell(
    ip: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OVERMIND_BUDGET", "plenty")
    ip.run_line_magic("load_ext", "overmind")
    said = capsys.readouterr()
    assert "OVERMIND_BUDGET" in said.out
    assert "Traceback" not in said.out + said.err
    assert overmind.enable() is False


def test_bad_settings_are_the_reason_of_every_load(
    ip: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OVERMIND_BUDGET", "plenty")
    store.reset()
    ip.run_line_magic("load_ext", "overmind")
    before = len(overmind.history())
    for _ in range(2):
        assert overmind.load(Path.read_bytes, Path(__file__)) == Path(__file__).read_bytes()
    found = overmind.history()[before:]
    assert [record.outcome for record in found] == ["bypass"] * 2
    assert all("OVERMIND_BUDGET" in record.reason for record in found)
    capsys.readouterr()
    ip.run_line_magic("overmind", "why 1")
    ip.run_line_magic("overmind", "")
    said = capsys.readouterr().out
    assert "bypass" in said and "overmind is off: loads are native:" in said
    assert said.replace("\n", " ").count("OVERMIND_BUDGET") == 2


def test_disabled_by_the_environment(
    ip: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runtime: Path
) -> None:
    monkeypatch.setenv("OVERMIND_DISABLE", "1")
    assert overmind.enable() is False
    ip.run_line_magic("load_ext", "overmind")
    assert "OVERMIND_DISABLE" in capsys.readouterr().out
    assert not extension.enabled()
    assert overmind.load(Path.read_bytes, Path(__file__)) == Path(__file__).read_bytes()
    assert list(runtime.iterdir()) == []


def test_disabled_is_said_once_at_info_level(fresh: Fresh, runtime: Path) -> None:
    source = "import overmind\nvalue = [overmind.enable(), overmind.enable()]\n"
    run = fresh.interpreter(source, on=False, env={"OVERMIND_DISABLE": "1", "OVERMIND_LOG": "info"})
    assert run.value == [False, False]
    assert run.stderr.count("OVERMIND_DISABLE") == 1
    quiet = fresh.interpreter(source, on=False, env={"OVERMIND_DISABLE": "1"})
    assert quiet.stderr == ""


def test_enable_and_disable_are_idempotent(runtime: Path) -> None:
    before = list(sys.meta_path)
    assert overmind.enable() and overmind.enable()
    assert len([finder for finder in sys.meta_path if type(finder).__name__ == "ImportHooks"]) <= 1
    overmind.disable()
    overmind.disable()
    assert list(sys.meta_path) == before


def test_the_published_names(runtime: Path) -> None:
    from overmind import api

    assert api.load is overmind.load
    assert api.monkey_patch_all() is True
    assert extension.enabled()
    overmind.disable()


def test_public_names_exist() -> None:
    for name in overmind.__all__:
        assert getattr(overmind, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = overmind.nonsense


def test_a_broken_installation_loads_natively(fresh: Fresh, runtime: Path) -> None:
    """overmind.load can't be imported: every load is native, said in one line."""
    source = """
import sys
sys.modules["overmind.recording"] = None  # import raises
import pathlib, overmind
path = pathlib.Path(overmind.__file__)
value = [overmind.enable(), overmind.load(pathlib.Path.read_bytes, path) == path.read_bytes()]
value.append(overmind.load(pathlib.Path.read_bytes, path) == path.read_bytes())
"""
    run = fresh.interpreter(source, on=False)
    assert run.value == [True, True, True]
    assert run.stderr.count("loads are native") == 1
