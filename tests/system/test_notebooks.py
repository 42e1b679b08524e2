# SPDX-License-Identifier: MIT
"""Every notebook runs as it is, twice, each time in a new kernel; the second time its loads are hits. The one that
needs Overmind's kernel runs in tests/starts."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from notebook_runs import NOTEBOOKS, compare, kernel_of, run


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if kernel_of(path) == "python3"], ids=lambda path: path.stem
)
def test_runs_twice_and_hits(path: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_MODELS", str(tmp_path))
    compare(run(path), run(path))


def test_hold_no_outputs() -> None:
    """Outputs of somebody's machine would be out of date at once."""
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not cell.outputs and cell.execution_count is None, path
