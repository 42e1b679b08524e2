# SPDX-License-Identifier: MIT
"""Every row of the exception table of kernel_ext/errors.cc, and one error of each kind that a real call gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from overmind import _core

ROWS = {
    "not found": _core.NotFoundError,
    "unavailable": _core.UnavailableError,
    "exhausted": _core.ExhaustedError,
    "denied": _core.DeniedError,
    "invalid": _core.InvalidError,
    "timeout": _core.TimeoutError,
    "version": _core.VersionError,
    "io": _core.IoError,
}


@pytest.mark.parametrize("code", ROWS)
def test_each_code_has_its_own_exception(code: str) -> None:
    error = _core.error(code, "what happened, to what")
    assert type(error) is ROWS[code]
    assert str(error) == f"{code}: what happened, to what"
    assert isinstance(error, _core.OvermindError)
    assert isinstance(error, RuntimeError)


def test_the_table_is_complete() -> None:
    named = {
        value for value in vars(_core).values() if isinstance(value, type) and issubclass(value, _core.OvermindError)
    }
    assert named == {*ROWS.values(), _core.OvermindError}


def test_ok_and_unknown_codes_have_none() -> None:
    for code in ("ok", "unknown", ""):
        with pytest.raises(ValueError, match="no such code"):
            _core.error(code, "")


def test_invalid_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERMIND_BUDGET", "lots")
    with pytest.raises(_core.InvalidError, match="OVERMIND_BUDGET"):
        _core.config()


def test_invalid_from_a_pickle() -> None:
    with pytest.raises(_core.InvalidError, match="pickle"):
        _core.pickle_globals(b"\x80\x05garbage")


def test_unavailable_without_a_daemon(runtime: Path) -> None:
    with pytest.raises(_core.UnavailableError):
        _core.Client(_core.config()).connect(start=False)


def test_denied_for_a_symlinked_runtime_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    os.symlink(tmp_path / "real", tmp_path / "link")
    config = _core.config()
    config.runtime_dir = str(tmp_path / "link")
    with pytest.raises(_core.DeniedError, match="link"):
        _core.Client(config).connect()


def test_exhausted_for_a_segment_that_no_machine_holds() -> None:
    with pytest.raises(_core.OvermindError):
        _core.make_segment(
            loader="l", target="t", meta=b"", skeleton=b"", tensors=b"", buffers=[(1, 2**62), (1, 2**62)]
        )
