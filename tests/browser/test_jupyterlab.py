# SPDX-License-Identifier: MIT
"""A notebook in JupyterLab, by clicks: run all, restart and run all, and what a reader sees of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import lab_server
import models
import nbformat
import pytest
from conftest import wait_for
from lab_server import TOKEN
from overmind.kernel import DISPLAY_NAME, NAME, kernelspec
from playwright.sync_api import Page, expect
from starts import WARM_SECONDS, caught_up, plain_starts

SECONDS = 90
BUILD = models.ROOT / "build"

CELLS = [
    "import os\nprint('process', os.getpid())",
    "import torch\nweights = torch.load('weights.pt')\nprint('sum', int(weights.sum()))",
    "from IPython.display import HTML, Markdown, display\n"
    "display(HTML('<b class=\"shown-html\">bold</b>'), Markdown('*slanted*'))",
    "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.show()",
    "import ipywidgets\n"
    "slider, label = ipywidgets.IntSlider(7), ipywidgets.Label()\n"
    "slider.observe(lambda change: setattr(label, 'value', f'Python saw {change.new}'), 'value')\n"
    "ipywidgets.VBox([slider, label])",
    "import sys\nprint('to stderr', file=sys.stderr)\nos.system('echo from a program')",
    "%overmind stats",
    "def divide(x):\n    return 1 / x\n\ndivide(0)",
]

WAITING = [
    "print('hello', input('who? '))",
    "import time\nprint('it sleeps')\ntime.sleep(300)",
    "print('never reached')",
]


@pytest.fixture
def work(folder: Path) -> Path:
    """The folder that JupyterLab shows, with two notebooks."""
    import torch

    place = folder / "work"
    place.mkdir()
    torch.save(torch.arange(500_000), place / "weights.pt")
    for name, cells in (("loop", CELLS), ("waiting", WAITING)):
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in cells],
            metadata={"kernelspec": {"name": NAME, "display_name": DISPLAY_NAME, "language": "python"}},
        )
        nbformat.write(notebook, place / f"{name}.ipynb")
    return place


@pytest.fixture
def notebook(
    runtime: Path, folder: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Page]]:
    """Opens a notebook in JupyterLab, and returns when its kernel is idle."""
    env = lab_server.environment(folder)
    monkeypatch.setenv("JUPYTER_DATA_DIR", env["JUPYTER_DATA_DIR"])
    monkeypatch.setenv("JUPYTER_PATH", "")
    kernelspec.install(user=True)
    with lab_server.lab(folder, env) as address, lab_server.browser(folder) as page:
        page.set_default_timeout(SECONDS * 1000)
        expect.set_options(timeout=SECONDS * 1000)

        def opened(name: str) -> Page:
            page.goto(f"{address}/lab/tree/{name}.ipynb?token={TOKEN}")
            expect(page.locator(".jp-Toolbar-kernelName")).to_have_text(DISPLAY_NAME)
            expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "idle")
            return page

        yield opened


def choose(page: Page, menu: str, entry: str) -> None:
    """Clicks an entry of the menu bar."""
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.locator(".lm-Menu-item", has_text=re.compile(f"^{re.escape(entry)}")).first.click()


def outputs_of(page: Page, cell: int):  # type: ignore[no-untyped-def]
    """The output area of a code cell."""
    found = page.locator(".jp-CodeCell").nth(cell)
    found.scroll_into_view_if_needed()
    return found.locator(".jp-Cell-outputArea")


def process_of(page: Page) -> int:
    output = outputs_of(page, 0)
    expect(output).to_contain_text(re.compile(r"process \d+"))
    return int(output.inner_text().split()[-1])


def all_cells_ran(page: Page) -> None:
    """The last one fails, so it has run when its error is there."""
    expect(outputs_of(page, len(CELLS) - 1)).to_contain_text("ZeroDivisionError")
    expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "idle")


def check_outputs(page: Page) -> None:
    """What each cell shows."""
    expect(outputs_of(page, 1)).to_contain_text("sum 124999750000")
    expect(outputs_of(page, 2).locator("b.shown-html")).to_have_text("bold")
    expect(outputs_of(page, 2).locator("em")).to_have_text("slanted")
    picture = outputs_of(page, 3).locator("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") > 100
    check_slider(page)
    expect(outputs_of(page, 5).locator("[data-mime-type='application/vnd.jupyter.stderr']")).to_have_text("to stderr\n")
    expect(outputs_of(page, 5)).to_contain_text("from a program")
    error = outputs_of(page, len(CELLS) - 1)
    expect(error).to_contain_text("divide(0)")
    assert error.locator("[class*=ansi-]").count() > 3, "a traceback without colours"


def check_slider(page: Page) -> None:
    """The value goes to the kernel and comes back as a label."""
    output = outputs_of(page, 4)
    handle = output.locator(".noUi-handle")
    handle.click()
    handle.press("ArrowRight")
    expect(output.locator(".widget-label", has_text="Python saw")).to_have_text("Python saw 8")


def test_run_restart_and_run_again(notebook: Callable[[str], Page], runtime: Path) -> None:
    page = notebook("loop")
    choose(page, "Run", "Run All Cells")
    all_cells_ran(page)
    check_outputs(page)
    first = process_of(page)
    wait_for(lambda: caught_up(runtime), WARM_SECONDS, "a zygote waits")
    plain = plain_starts(runtime)
    choose(page, "Kernel", "Restart Kernel and Run All Cells")
    page.locator(".jp-Dialog-button.jp-mod-warn").click()
    expect(outputs_of(page, 0)).not_to_contain_text(f"process {first}")
    all_cells_ran(page)
    assert process_of(page) != first
    assert plain_starts(runtime) == plain, "the restart was a plain start"
    check_outputs(page)
    stats = outputs_of(page, 6).locator(".overmind-stats")
    expect(stats).to_contain_text("zygote")
    expect(stats).to_contain_text("1 hits (100%)")
    BUILD.mkdir(exist_ok=True)
    stats.screenshot(path=BUILD / "jupyterlab_stats.png")
    page.screenshot(path=BUILD / "jupyterlab.png")


def test_a_question_and_an_interrupt(notebook: Callable[[str], Page]) -> None:
    page = notebook("waiting")
    choose(page, "Run", "Run All Cells")
    answer = page.locator("input.jp-Stdin-input")
    answer.fill("world")
    answer.press("Enter")
    expect(outputs_of(page, 0)).to_contain_text("hello world")
    expect(outputs_of(page, 1)).to_contain_text("it sleeps")
    choose(page, "Kernel", "Interrupt Kernel")
    expect(outputs_of(page, 1)).to_contain_text("KeyboardInterrupt")
    expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "idle")
    expect(outputs_of(page, 2)).to_have_text("")
