# SPDX-License-Identifier: MIT
"""Every notebook runs as it is, twice, each time in a new kernel; the second time its loads are hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((models.ROOT / "notebooks").glob("*.ipynb"))

_REPORT = """
import json, overmind
print(json.dumps([[record.outcome, record.loader, record.target, record.reason] for record in overmind.history()]))
"""


def run(path: Path) -> tuple[list[Any], list[list[str]]]:
    """(the executed code cells, the loads of the run)."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_REPORT))
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    *cells, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return cells, json.loads(printed(last))


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_twice_and_hits(path: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_MODELS", str(tmp_path))
    first, first_loads = run(path)
    second, second_loads = run(path)
    assert "miss" in {load[0] for load in first_loads}, first_loads
    assert {load[0] for load in second_loads} == {"hit"}, [load for load in second_loads if load[0] != "hit"]
    for one, other in zip(first, second, strict=True):
        if "same" in one.metadata.get("tags", []):
            assert printed(one) == printed(other) != "", one.source
            assert "False" not in printed(one), f"{one.source}\n{printed(one)}"


def test_hold_no_outputs() -> None:
    """Outputs of somebody's machine would be out of date at once."""
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not cell.outputs and cell.execution_count is None, path
