# SPDX-License-Identifier: MIT
"""Kernels and scripts: restarts, starts, round trips and output, beside a plain ipykernel and `python`.

A restart is measured as a notebook's user has it: `restart_kernel()`, the wait until the kernel answers, the cell with
the imports, the cell with the four loads of the pipeline, a cell with one operation. Four ways, one after another in
every round: a plain ipykernel, our kernel with no zygote ("cold"), our kernel as its kernelspec starts it ("warm"), and
a kernel that does nothing at all ("bare"), which shows what jupyter_client itself takes.

No file here may be called kernels.py: transformers would take it for the package.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bare_kernel
import psutil
from conftest import wait_for
from kernel_sessions import SECONDS, Session, ipykernel, ours
from overmind.zygote.census import memory_of
from starts import LEARNED, WARM_SECONDS, ended_zygotes, outcome, overmind_run, standby_waits, zygotes

WAYS = ("ipykernel", "cold", "warm", "bare")
PHASES = ("restart", "ready", "imports", "loads", "first operation")
ROUND_TRIPS = 200
LINES, MEGABYTES = 10_000, 50
SCRIPT = "import torch, transformers, diffusers\nprint(torch.__version__)\n"

IMPORTS = """
import torch, transformers, diffusers
from diffusers import AutoencoderKL, ControlNetModel, StableDiffusionControlNetPipeline
"""
LOADS = """
vae = AutoencoderKL.from_pretrained({vae!r}, dtype=torch.float16)
a = ControlNetModel.from_pretrained({controlnet_a!r}, dtype=torch.float16)
b = ControlNetModel.from_pretrained({controlnet_b!r}, dtype=torch.float16)
pipe = StableDiffusionControlNetPipeline.from_pretrained({pipeline!r}, vae=vae, controlnet=[a, b], dtype=torch.float16)
"""
OPERATION = "assert pipe.vae is vae and torch.isfinite(next(pipe.unet.parameters()).float().sum())"
OUTPUTS = {
    f"{LINES:,} lines": f"for i in range({LINES}): print(i)",
    f"{MEGABYTES} MB": f"for i in range({MEGABYTES}): print('x' * 1_000_000)",
}


class Notebook:
    """One kernel of one way, restarted as often as one likes. Use it in a `with`."""

    def __init__(self, way: str, environment: dict[str, str], argv: list[str] | None = None) -> None:
        plain = way == "ipykernel"
        begun = time.perf_counter()
        self._session = Session(
            argv or (ipykernel() if plain else ours()),
            zygote=way == "warm",
            env={**environment, **({"OVERMIND_DISABLE": "1"} if plain else {})},
        )
        self.started = time.perf_counter() - begun
        self.way = way
        self.manager, self.client = self._session.manager, self._session.client

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def run(self, cell: str) -> float:
        """Seconds until the kernel is idle again. SystemExit with its traceback if the cell raises."""
        begun = time.perf_counter()
        reply = self.client.execute_interactive(cell, timeout=10 * SECONDS, output_hook=lambda _message: None)
        taken = time.perf_counter() - begun
        if reply["content"]["status"] != "ok":
            raise SystemExit(f"{self.way}: " + "\n".join(reply["content"]["traceback"]))
        return taken

    def restart(self, cells: list[str]) -> list[float]:
        """Seconds of each of PHASES."""
        begun = time.perf_counter()
        self.manager.restart_kernel()
        returned = time.perf_counter()
        self.client.wait_for_ready(timeout=SECONDS)
        ready = time.perf_counter()
        return [returned - begun, ready - returned, *(self.run(cell) for cell in cells)]


def restarts(environment: dict[str, str], where: Callable[[str], Path], runs: int) -> dict[str, Any]:
    """Samples of PHASES by way, and what the zygote and its standby take."""
    runtime = Path(environment["OVERMIND_RUNTIME_DIR"])
    folders = {name: str(where(name)) for name in ("vae", "controlnet_a", "controlnet_b", "pipeline")}
    cells = [IMPORTS, LOADS.format(**folders), OPERATION]
    samples: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        argv = {"bare": stack.enter_context(bare_kernel.running())}
        notebooks = {way: stack.enter_context(Notebook(way, environment, argv.get(way))) for way in WAYS}
        for notebook in notebooks.values():
            for cell in cells:
                notebook.run(cell)
        _settle(notebooks["warm"], cells, runtime)
        for _ in range(runs):
            for way in WAYS:
                samples[way].append(notebooks[way].restart(cells))
                wait_for(lambda: standby_waits(runtime), WARM_SECONDS, "a standby waits")
        memory = sum(map(memory_of, _idle(runtime)))
    return {"samples": samples, "idle_bytes": memory}


def _settle(notebook: Notebook, cells: list[str], runtime: Path) -> None:
    """After a first plain start: the zygote learns what these cells import."""
    wait_for(lambda: standby_waits(runtime, modules=LEARNED), WARM_SECONDS, "a zygote has the libraries")
    notebook.restart(cells)
    wait_for(lambda: standby_waits(runtime, modules=LEARNED), WARM_SECONDS, "a standby waits")


def _idle(runtime: Path) -> Iterator[int]:
    """Pids of the zygotes, and of each the standby: its child that no launcher has yet, the youngest."""
    for row in zygotes(runtime):
        yield row["pid"]
        yield max(psutil.Process(row["pid"]).children(), key=psutil.Process.create_time).pid


def answers(environment: dict[str, str], runs: int) -> dict[str, Any]:
    """Fresh starts, round trips and output of an ipykernel and of ours."""
    runtime = Path(environment["OVERMIND_RUNTIME_DIR"])
    found: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in ("start", "1+1", *OUTPUTS)} for way in ("ipykernel", "warm")
    }
    for _ in range(runs):
        for way, samples in found.items():
            if way == "warm":
                wait_for(lambda: standby_waits(runtime), WARM_SECONDS, "a standby waits")
            with Notebook(way, environment) as notebook:
                samples["start"].append(notebook.started)
                samples["1+1"].append(statistics.median(notebook.run("1+1") for _ in range(ROUND_TRIPS)))
                for name, cell in OUTPUTS.items():
                    samples[name].append(notebook.run(cell))
    return {"samples": found}


def scripts(environment: dict[str, str], folder: Path, runs: int) -> dict[str, Any]:
    """Seconds of a script under `python` and under `overmind run`."""
    runtime = Path(environment["OVERMIND_RUNTIME_DIR"])
    program = folder / "program.py"
    program.write_text(SCRIPT)
    before = len(zygotes(runtime))
    commands = {"python": [sys.executable, str(program)], "overmind run": overmind_run(str(program))}
    expected = outcome(commands["overmind run"], env=environment)
    wait_for(lambda: standby_waits(runtime, before + 1), WARM_SECONDS, "a zygote waits for the script")
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            begun = time.perf_counter()
            done = outcome(command, env=environment)
            samples[name].append(time.perf_counter() - begun)
            if (done.code, done.out) != (0, expected.out):
                raise SystemExit(f"{name}: {done}")
            wait_for(lambda: standby_waits(runtime, before + 1), WARM_SECONDS, "a standby waits")
    return {"samples": samples}


def measure(environment: dict[str, str], where: Callable[[str], Path], folder: Path, runs: int) -> dict[str, Any]:
    """All of it: {"restarts": ..., "answers": ..., "scripts": ...}."""
    with ended_zygotes(Path(environment["OVERMIND_RUNTIME_DIR"])):
        return {
            "restarts": restarts(environment, where, runs),
            "answers": answers(environment, runs),
            "scripts": scripts(environment, folder, runs),
        }
