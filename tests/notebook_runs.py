# SPDX-License-Identifier: MIT
"""The notebooks of notebooks/, run as they are in the kernel that they name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((models.ROOT / "notebooks").glob("*.ipynb"))

_REPORT = """
import json, overmind
print(json.dumps([[record.outcome, record.loader, record.target, record.reason] for record in overmind.history()]))
"""


@dataclass(frozen=True)
class NotebookRun:
    """The executed code cells, and the loads: outcome, loader, target, reason."""

    cells: list[Any]
    loads: list[list[str]]


def kernel_of(path: Path) -> str:
    return str(nbformat.read(path, as_version=4).metadata.kernelspec.name)


def run(path: Path) -> NotebookRun:
    """Runs it in a new kernel. A cell that fails is an error."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_REPORT))
    NotebookClient(
        notebook, timeout=240, kernel_name=kernel_of(path), resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    *cells, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return NotebookRun(cells, json.loads(printed(last)))


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def tagged(ran: NotebookRun, tag: str) -> list[Any]:
    return [cell for cell in ran.cells if tag in cell.metadata.get("tags", [])]


def compare(first: NotebookRun, second: NotebookRun) -> None:
    """The second run has hits only, and cells tagged `same` print the same in both."""
    assert "miss" in {load[0] for load in first.loads}, first.loads
    assert {load[0] for load in second.loads} == {"hit"}, [load for load in second.loads if load[0] != "hit"]
    for one, other in zip(tagged(first, "same"), tagged(second, "same"), strict=True):
        assert printed(one) == printed(other) != "", one.source
        assert "False" not in printed(one), f"{one.source}\n{printed(one)}"
