# SPDX-License-Identifier: MIT
"""Runs notebooks/01_quickstart.ipynb in a real kernel, restarts that kernel, runs it again, and prints one table.

Four runs: the first one, one after a plain restart (OVERMIND_DISABLE=1), one after a restart with Overmind, one after a
restart of Overmind's own kernel, which had been restarted before: the end of a first one, that no zygote started, takes
the interpreter 2 s after such imports. A cell that fails ends the demo with its traceback; so does a cell tagged "same"
that prints something else than it did in the first run. The store is the demo's own and ends with it.

    python tests/demo.py [--tiny] [--models DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import models
import nbformat
from private_store import private_store

NOTEBOOK = models.ROOT / "notebooks" / "01_quickstart.ipynb"
CELL_SECONDS = 600
READY_SECONDS = 120


@dataclass(frozen=True)
class Cell:
    number: int
    source: str
    tags: tuple[str, ...]

    @property
    def label(self) -> str:
        """The line that says what the cell does: its comment, else its first assignment or magic, else its first."""
        lines = [line.strip() for line in self.source.splitlines() if line.strip()]
        telling = [line for line in lines if not line.startswith(("import ", "from "))]
        label = (telling or lines)[0].removeprefix("# ")
        return label if len(label) <= 52 else label[:49] + "..."


@dataclass(frozen=True)
class Pass:
    """One run of all cells in one fresh kernel."""

    ready: float
    """Seconds from asking for the kernel until it answered."""
    seconds: list[float]
    printed: list[str]


class CellError(Exception):
    """A cell raised; the message is the kernel's traceback."""


def read_cells() -> list[Cell]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [Cell(number, cell.source, tuple(cell.metadata.get("tags", ()))) for number, cell in enumerate(code, 1)]


def run_cell(client: Any, cell: Cell) -> tuple[float, str]:
    """Seconds until the kernel is idle again, and what the cell wrote to stdout."""
    printed: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed.append(content["text"])

    start = time.perf_counter()
    reply = client.execute_interactive(cell.source, timeout=CELL_SECONDS, output_hook=collect, allow_stdin=False)
    seconds = time.perf_counter() - start
    content = reply["content"]
    if content["status"] != "ok":
        traceback = "\n".join(content.get("traceback") or [str(content)])
        raise CellError(f"cell {cell.number} failed: {cell.label}\n{traceback}")
    return seconds, "".join(printed)


def run_pass(manager: Any, cells: list[Cell], environment: dict[str, str], log: IO[bytes]) -> Pass:
    """Starts the kernel, or restarts the running one, and runs every cell in it. `log` takes what it says itself."""
    start = time.perf_counter()
    if manager.has_kernel:
        manager.restart_kernel(env=environment)
    else:
        manager.start_kernel(env=environment, cwd=str(NOTEBOOK.parent), stdout=log, stderr=log)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=READY_SECONDS)
        ready = time.perf_counter() - start
        results = [run_cell(client, cell) for cell in cells]
    finally:
        client.stop_channels()
    return Pass(ready, [seconds for seconds, _ in results], [printed for _, printed in results])


def compare(cells: list[Cell], passes: list[Pass]) -> None:
    for index, cell in enumerate(cells):
        printed = {run.printed[index] for run in passes}
        if "same" in cell.tags and len(printed) != 1:
            told = "\n---\n".join(run.printed[index] for run in passes)
            raise CellError(f"cell {cell.number} ({cell.label}) printed different things:\n{told}")


def table(cells: list[Cell], passes: list[Pass]) -> str:
    head = ["cell", "first run", "restart, plain", "restart, Overmind", "ratio", "restart, its kernel", "ratio"]
    rows = [_row("(the kernel starts and answers)", [run.ready for run in passes])]
    rows += [_row(f"{cell.number:2} {cell.label}", [run.seconds[i] for run in passes]) for i, cell in enumerate(cells)]
    loads = [index for index, cell in enumerate(cells) if "load" in cell.tags]
    totals = [
        _row("all loads", [sum(run.seconds[index] for index in loads) for run in passes]),
        _row("everything, from the restart on", [run.ready + sum(run.seconds) for run in passes]),
    ]
    widths = [max(len(row[column]) for row in [head, *rows, *totals]) for column in range(len(head))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    drawn = [_line(head, widths), rule, *(_line(row, widths) for row in rows), rule]
    return "\n".join(drawn + [_line(row, widths) for row in totals])


def _row(label: str, seconds: list[float]) -> list[str]:
    first, plain, *ours = seconds
    ratios = [part for value in ours for part in (f"{value:.3f} s", f"{plain / value:.1f}x")]
    return [label, f"{first:.3f} s", f"{plain:.3f} s", *ratios]


def _line(row: list[str], widths: list[int]) -> str:
    return "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])


def prepare(cache: Path, tiny: bool) -> None:
    """Makes the models before any clock runs. The notebook takes the full-size ones when they are there."""
    for name in ("vae", "controlnet_a", "controlnet_b", "pipeline"):
        models.folder(f"tiny_{name}" if tiny else name, cache)


def run_demo(cache: Path) -> str:
    cells = read_cells()
    with private_store() as environment, tempfile.TemporaryFile() as log:
        # Nothing is downloaded, so no hub need be asked.
        environment |= {"NOTEBOOK_MODELS": str(cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            passes = run_passes(cells, environment, log)
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
    compare(cells, passes)
    return table(cells, passes)


def run_passes(cells: list[Cell], environment: dict[str, str], log: IO[bytes]) -> list[Pass]:
    from jupyter_client.manager import KernelManager

    passes = []
    with _running(KernelManager(kernel_name="python3")) as manager:
        for title, extra in (
            ("first run", {}),
            ("after a plain restart", {"OVERMIND_DISABLE": "1"}),
            ("after a restart with Overmind", {}),
        ):
            _say(title)
            passes.append(run_pass(manager, cells, environment | extra, log))
    return [*passes, run_own_kernel(cells, environment, log)]


def run_own_kernel(cells: list[Cell], environment: dict[str, str], log: IO[bytes]) -> Pass:
    """The second restart of Overmind's kernel: its first start was a plain one, and taught its zygote the imports."""
    from kernel_sessions import Manager, ours
    from starts import LEARNED, WARM_SECONDS, standby_waits, wait_for

    runtime = Path(environment["OVERMIND_RUNTIME_DIR"])
    with _running(Manager()) as manager:
        manager.argv = ours()
        _say("first run in Overmind's kernel")
        run_pass(manager, cells, environment, log)
        _say("waiting until its zygote has made these imports")
        wait_for(lambda: standby_waits(runtime, modules=LEARNED), WARM_SECONDS, "a zygote waits for the next start")
        run_pass(manager, cells, environment, log)
        wait_for(lambda: standby_waits(runtime, modules=LEARNED), WARM_SECONDS, "a standby waits")
        _say("after another restart of that kernel")
        return run_pass(manager, cells, environment, log)


@contextlib.contextmanager
def _running(manager: Any) -> Iterator[Any]:
    """Ends the manager's kernel with the block."""
    try:
        yield manager
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def _say(title: str) -> None:
    print(f"demo: {title} ...", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models: shows that it works, not how fast it is")
    parser.add_argument("--models", type=Path, default=models.CACHE, help="cache folder of tests/models.py")
    options = parser.parse_args()
    cache = options.models.resolve()
    if options.tiny and (cache / "pipeline").is_dir():
        parser.error(f"{cache} holds the full-size pipeline; give --models another folder")
    _say("making the models, unless they are there")
    prepare(cache, options.tiny)
    try:
        print(run_demo(cache))
    except CellError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
