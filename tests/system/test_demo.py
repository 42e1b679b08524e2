# SPDX-License-Identifier: MIT
"""`make demo` works, with small models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import demo
import models
import pytest

PROGRAM = models.ROOT / "tests" / "demo.py"


def test_prints_every_cell_of_all_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--tiny", "--models", str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for cell in demo.read_cells():
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"{cell.number:2} {cell.label}"))
        assert row.count(" s ") == 4 and row.endswith("x"), row
    assert "all loads" in done.stdout


def test_a_failing_cell_ends_it_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "read_cells", lambda: [demo.Cell(1, "# divide\n1 / 0", ())])
    monkeypatch.setattr(demo, "prepare", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["demo", "--models", str(tmp_path)])
    assert demo.main() == 1
    told = capsys.readouterr().err
    assert "cell 1 failed: divide" in told and "ZeroDivisionError" in told


def test_different_output_of_a_same_cell_is_an_error() -> None:
    cell = demo.Cell(1, "# number", ("same",))
    runs = [demo.Pass(1.0, [1.0], [printed]) for printed in ("1\n", "1\n", "2\n")]
    demo.compare([cell], runs[:2])
    with pytest.raises(demo.CellError, match="printed different things"):
        demo.compare([cell], runs)
