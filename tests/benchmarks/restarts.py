# SPDX-License-Identifier: MIT
"""Restarts of one kernel from a zygote, many in a row: how long they take, and what they leave behind.

python tests/benchmarks/restarts.py [--rounds 200] [--cell "import torch"] [--engine xeus]
python tests/benchmarks/restarts.py --script "import torch, transformers, diffusers; print(1)"
python tests/benchmarks/restarts.py --kill [--rounds 100] [--seed 1] [--engine xeus]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import random_kills
from conftest import wait_for
from private_store import private_store
from starts import Kernel, outcome, overmind_run, plain_starts, warm, warm_kernel, zygotes


def restarts(runtime: Path, folder: Path, rounds: int, cell: str, engine: str) -> None:
    warm_kernel(runtime, folder, cell, engine)
    (zygote,) = zygotes(runtime)
    before, taken, descriptors, memory = len(plain_starts(runtime)), [], [], []
    process = psutil.Process(zygote["pid"])
    with Kernel(folder, engine) as kernel:
        for _ in range(rounds):
            began = time.perf_counter()
            kernel.restart()
            kernel.run(cell)
            taken.append(time.perf_counter() - began)
            descriptors.append(process.num_fds())
            memory.append(process.memory_full_info().pss)
    wait_for(lambda: len(process.children()) == 1, 30, "the last one has ended, and a standby waits")
    family = process.children(recursive=True)
    print(f"restart to the cell done: median {statistics.median(taken):.3f} s, worst {max(taken):.3f} s of {rounds}")
    print(f"plain starts among them: {len(plain_starts(runtime)) - before}")
    print(f"zygote: descriptors {descriptors[0]} -> {descriptors[-1]}, PSS {memory[0] >> 20} -> {memory[-1] >> 20} MiB")
    print(f"left: {[(each.pid, each.status()) for each in family]} (one sleeping standby is right)")


def runs(runtime: Path, folder: Path, rounds: int, source: str) -> None:
    program = folder / "program.py"
    program.write_text(source + "\n")
    warm(runtime, str(program))
    figures = {}
    for name, command in (("python", [sys.executable, str(program)]), ("overmind run", overmind_run(str(program)))):
        taken = []
        for _ in range(rounds):
            wait_for(lambda: len(psutil.Process(zygotes(runtime)[0]["pid"]).children()) == 1, 30, "a standby waits")
            began = time.perf_counter()
            assert outcome(command).code == 0
            taken.append(time.perf_counter() - began)
        figures[name] = statistics.median(taken)
        print(f"{name}: median {figures[name]:.3f} s of {rounds}")
    print(f"python / overmind run: {figures['python'] / figures['overmind run']:.1f}")


def kills(runtime: Path, folder: Path, rounds: int, seed: int, engine: str) -> None:
    """Something is killed in the middle of each start; ends with an AssertionError if a kernel is missing."""
    said: Counter[tuple[str, str]] = Counter()
    for each in random_kills.rounds(runtime, folder, engine, rounds, seed):
        said[each.victim, each.said] += 1
    for (victim, outcome_of_start), count in sorted(said.items()):
        print(f"killed: {victim:8}  the kernel was {outcome_of_start or 'not asked for any more'}: {count}")
    print(f"plain starts: {len(plain_starts(runtime))} of {rounds}; left: {random_kills.left(runtime)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--cell", default="pass")
    parser.add_argument("--script")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", default="xeus")
    chosen = parser.parse_args()
    with private_store() as environment, tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment)
        runtime = Path(environment["OVERMIND_RUNTIME_DIR"])
        if chosen.script:
            runs(runtime, Path(folder), chosen.rounds or 5, chosen.script)
        elif chosen.kill:
            kills(runtime, Path(folder), chosen.rounds or 100, chosen.seed, chosen.engine)
        else:
            restarts(runtime, Path(folder), chosen.rounds or 200, chosen.cell, chosen.engine)


if __name__ == "__main__":
    main()
