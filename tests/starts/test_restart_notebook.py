# SPDX-License-Identifier: MIT
"""notebooks/03_restart_loop.ipynb as its reader runs it: started plainly, then from a zygote."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import wait_for
from notebook_runs import NOTEBOOKS, compare, kernel_of, printed, run, tagged
from overmind.kernel import NAME, kernelspec
from starts import WARM_SECONDS, caught_up, plain_starts, zygotes

(NOTEBOOK,) = (path for path in NOTEBOOKS if kernel_of(path) == NAME)


def test_runs_plainly_and_from_a_zygote(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PATH", "")
    kernelspec.install(user=True)
    first = run(NOTEBOOK)
    wait_for(lambda: caught_up(runtime), WARM_SECONDS, "a zygote has imported what the notebook did")
    plain = plain_starts(runtime)
    second = run(NOTEBOOK)
    assert plain_starts(runtime) == plain, "the second was a plain start"
    assert [printed(ran.cells[0]) for ran in (first, second)] == [
        "This kernel started plainly\n",
        "This kernel started from a zygote\n",
    ]
    compare(first, second)
    ((one,), (other,)) = tagged(first, "random"), tagged(second, "random")
    assert not set(printed(one).split()) & set(printed(other).split()), "random numbers came again"
    stats = next(cell for cell in second.cells if cell.source == "%overmind stats").outputs[0].data
    (zygote,) = zygotes(runtime)
    assert f"zygote {zygote['pid']} for kernel xeus: {zygote['modules']} modules imported" in stats["text/plain"]
    assert "last plain start" in stats["text/plain"] and "last plain start" in stats["text/html"]
