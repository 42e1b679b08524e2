# SPDX-License-Identifier: MIT
"""`overmind kernel install`, `list`, `remove`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from overmind.cli import main
from overmind.kernel import kernelspec


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Jupyter looks, in this test's own folder."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "prefix" / "share" / "jupyter"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["kernel", *args])


def listed() -> Any:
    return json.loads(run("list", "--json").output)


def test_install_list_remove(tmp_path: Path) -> None:
    assert listed() == {}
    result = run("install", "--user")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "user" / "kernels" / "overmind"
    assert listed() == {"overmind": str(folder)}
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["argv"] == kernelspec.argv()
    assert os.access(spec["argv"][0], os.X_OK) and "{connection_file}" in spec["argv"]
    assert spec["metadata"]["interpreter"]["path"] == sys.executable
    assert spec["display_name"] == "Python 3 (Overmind)"
    assert spec["language"] == "python"
    assert folder.stat().st_mode & 0o055 == 0o055, "other users of a shared installation must read it"
    assert run("install", "--user").exit_code == 0, "again, over itself"
    assert run("remove").exit_code == 0
    assert listed() == {} and not folder.exists()


def test_into_the_environment_under_another_name(tmp_path: Path) -> None:
    result = run("install", "--sys-prefix", "--name", "mine", "--display-name", "Mine", "--json")
    folder = tmp_path / "prefix" / "share" / "jupyter" / "kernels" / "mine"
    assert json.loads(result.output) == {"name": "mine", "folder": str(folder)}
    assert json.loads((folder / "kernel.json").read_text())["display_name"] == "Mine"
    assert run("remove", "mine").exit_code == 0


def test_an_ipykernel_that_starts_as_fast(tmp_path: Path) -> None:
    assert run("install", "--user").exit_code == 0
    assert run("install", "--user", "--engine", "ipykernel").exit_code == 0
    folder = tmp_path / "user" / "kernels" / "overmind-ipykernel"
    assert listed() == {"overmind": str(tmp_path / "user" / "kernels" / "overmind"), "overmind-ipykernel": str(folder)}
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["argv"] == kernelspec.argv("ipykernel") != kernelspec.argv()
    assert spec["display_name"] == "Python 3 (Overmind, ipykernel)"
    assert run("remove", "overmind-ipykernel").exit_code == 0


def test_the_default_is_the_environment_if_it_is_a_virtual_one(tmp_path: Path) -> None:
    assert run("install").exit_code == 0
    assert listed() == {"overmind": str(tmp_path / "prefix" / "share" / "jupyter" / "kernels" / "overmind")}


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "user" / "kernels" / "other"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text('{"argv": ["x"], "display_name": "Other", "language": "python"}')
    result = run("remove", "other")
    assert result.exit_code == 1
    assert "no kernelspec of Overmind" in result.output
    assert folder.exists()


@pytest.mark.parametrize("args", [("--user", "--sys-prefix"), ("--user", "--name", "not a name")])
def test_refusals(args: tuple[str, ...]) -> None:
    result = run("install", *args)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("absent", "word"), [("overmind._kernel", "xeus-dev"), ("comm", "overmind-jupyter[kernel]")])
def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch, absent: str, word: str) -> None:
    find = kernelspec.importlib.util.find_spec
    monkeypatch.setattr(kernelspec.importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    result = run("install", "--user")
    assert result.exit_code == 1
    assert word in result.output
