# SPDX-License-Identifier: MIT
"""Measures Overmind beside plain loads; prints a table and writes build/bench.json.

Every figure comes from a fresh process. In each round plain, first load (miss) and hit follow each other, so that a
slow minute of the machine falls on all three; each first warms the memory that it is about to need. Loads and
reads are told at the machine's usual speed in this run (report.at_usual_speed). There are five rounds, and more until
the goals are decided: the odd rounds alone and the even ones alone say the same of each. Missed goals are reported,
they are no failure: the exit status says only whether everything could be measured.

    python tests/benchmarks/run.py [--quick] [--only NAME]... [--runs N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import kernel_figures
import report
from private_store import connect, private_store, snapshots
from scenarios import SCENARIOS, folders, read_files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

CHILD_SECONDS = 900
OTHERS = ("memory", "bare", "kernels")
LEAST, MOST = 5, 15  # rounds
MODES = ("plain", "miss", "hit")

Round = dict[str, Any]
"""Samples of one round by mode, or by what `bare` measures."""
Limits = tuple[int, int]
"""Fewest rounds and most."""


class Bench:
    """The store of this run (own runtime folder, own daemon) and the processes measured against it."""

    def __init__(self, environment: dict[str, str], models: Path, tiny: bool) -> None:
        runtime = Path(environment["OVERMIND_RUNTIME_DIR"])
        self.models, self.tiny = models, tiny
        self.where = folders(models, tiny)
        self.tiny_file = runtime / "tiny.pt"
        self.environment = {
            **environment,
            "OVERMIND_BENCH_FILE": str(self.tiny_file),
            # Neither side may ask a hub about folders that are here.
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.store = connect(runtime, start=True)

    def daemon_pid(self) -> int:
        return int(self.store.stats()["daemon_pid"])

    def clear(self) -> None:
        self.store.drop_all()

    def _command(self, *arguments: str) -> list[str]:
        tiny = ["--tiny"] if self.tiny else []
        return [sys.executable, str(HERE / "child.py"), *arguments, "--models", str(self.models), *tiny]

    def child(self, *arguments: str) -> dict[str, Any]:
        """Runs one measurement to its end."""
        done = subprocess.run(
            self._command(*arguments), env=self.environment, capture_output=True, text=True, timeout=CHILD_SECONDS
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    @contextlib.contextmanager
    def holders(self, mode: str, count: int) -> Iterator[list[int]]:
        """`count` processes that hold the fp32 Llama (or nothing); the pids, once all are ready."""
        with contextlib.ExitStack() as stack:
            running = []
            for _ in range(count):
                process = subprocess.Popen(
                    self._command("hold", mode),
                    env=self.environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                stack.callback(_end, process)
                running.append(process)
            for process in running:
                assert process.stdout is not None and process.stderr is not None
                if not process.stdout.readline():
                    raise SystemExit(f"hold {mode} failed:\n{process.stderr.read()[-4000:]}")
            yield [process.pid for process in running]


def _end(process: subprocess.Popen[str]) -> None:
    """Closing its input ends a holder; a hung one is killed by its pid."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def enough(rounds: list[Round], limits: Limits, judge: Callable[[list[Round]], dict[str, Any]]) -> bool:
    """Whether the goals are decided by the rounds so far, or there are as many as there may be."""
    least, most = limits
    if not least <= len(rounds) < most:
        return len(rounds) >= most
    odd, even = ([goal["passed"] for goal in judge(half)["goals"]] for half in (rounds[::2], rounds[1::2]))
    return odd == even


def measure_loads(bench: Bench, name: str, limits: Limits) -> dict[str, Any]:
    """Of one scenario."""
    scenario = SCENARIOS[name]

    def judge(rounds: list[Round]) -> dict[str, Any]:
        return report.scenario(scenario, {mode: [each[mode] for each in rounds] for mode in MODES})

    rounds: list[Round] = []
    while not enough(rounds, limits, judge):
        bench.clear()
        rounds.append({})
        for mode in MODES:
            rounds[-1][mode] = bench.child("load", name, mode)
            wait_for_snapshots()
    bench.clear()
    sums = {sample["checksum"] for each in rounds for sample in each.values()}
    if len(sums) != 1:
        raise SystemExit(f"{name}: the weights differ between plain and Overmind; no figure is worth anything")
    return judge(rounds)


def wait_for_snapshots() -> None:
    """Until no snapshot is at work. One goes on for a while after its commit, at idle priority, to put the segment on
    huge pages; a kernel is restarted later than that, the next process of this benchmark is not."""
    deadline = time.monotonic() + CHILD_SECONDS
    while snapshots():
        if time.monotonic() > deadline:
            raise SystemExit("a snapshot does not end")
        time.sleep(0.05)


def pss(pids: list[int]) -> int:
    """Proportional set size of these processes together, in bytes: a page that two share counts half in each."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def own_memory(pid: int) -> int:
    """Resident bytes of a process without shared memory, that is without mapped segments."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return (int(status["VmRSS"].split()[0]) - int(status["RssShmem"].split()[0])) * 1024


def measure_memory(bench: Bench, processes: int) -> dict[str, Any]:
    """What many processes with the same fp32 Llama take beyond what they take without it, in copies of its weights."""
    bench.clear()
    nbytes = bench.child("load", "llama_fp32", "miss")["nbytes"]
    with bench.holders("none", processes) as pids:
        base = pss(pids)
    with bench.holders("hit", processes) as pids:
        held = pss(pids)
        daemon = own_memory(bench.daemon_pid())
    with bench.holders("none", 1) as pids:
        base_one = pss(pids)
    with bench.holders("plain", 1) as pids:
        plain_one = pss(pids)
    bench.clear()
    return report.memory(
        {
            "processes": processes,
            "weights_bytes": nbytes,
            "pss_without_model": base,
            "pss_with_model": held,
            "plain_pss_of_one_without_model": base_one,
            "plain_pss_of_one_with_model": plain_one,
            "daemon_bytes": daemon,
        }
    )


def measure_bare(bench: Bench, limits: Limits, entries: int, hits: int) -> dict[str, Any]:
    """Time of a hit that restores next to nothing, with one entry in the catalog and then with many, in one process:
    two processes differ by up to a quarter with the same entries."""
    import torch

    torch.save({"tensor": torch.arange(4)}, bench.tiny_file)
    judge = functools.partial(report.bare, entries=entries)
    rounds: list[Round] = []
    while not enough(rounds, limits, judge):
        rounds.append({})
        for loader in report.BARE_LOADERS:
            bench.clear()
            rounds[-1][loader] = bench.child("bare", loader, str(hits), str(entries))
    bench.clear()
    return judge(rounds)


def measure_kernels(bench: Bench, runs: int) -> dict[str, Any]:
    bench.clear()
    read_files(bench.where, SCENARIOS["pipeline"].models)
    found = kernel_figures.measure(bench.environment, bench.where, bench.tiny_file.parent, runs)
    bench.clear()
    return report.kernels(found)


def measure(bench: Bench, names: list[str], limits: Limits, quick: bool, results: dict[str, Any]) -> None:
    """Adds to `results`, which keeps what was measured if something fails."""
    for name in names:
        start = time.monotonic()
        if name == "memory":
            results[name] = measure_memory(bench, 2 if quick else 8)
        elif name == "bare":
            results[name] = measure_bare(bench, limits, 20 if quick else 1_000, 20 if quick else 300)
        elif name == "kernels":
            results[name] = measure_kernels(bench, limits[0])
        else:
            results[name] = measure_loads(bench, name, limits)
        print(f"{name}: measured in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, one round: shows that it works, no more")
    parser.add_argument("--only", action="append", choices=[*SCENARIOS, *OTHERS], help="may be given more than once")
    parser.add_argument("--runs", type=int, help="rounds per figure, neither more nor fewer (1 with --quick)")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench.json")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models")
    options = parser.parse_args()
    runs = options.runs or (1 if options.quick else None)
    limits = (runs, runs) if runs else (LEAST, MOST)
    names = options.only or [*SCENARIOS, *OTHERS]
    results: dict[str, Any] = {}
    with private_store() as environment:
        try:
            bench = Bench(environment, options.models.resolve(), options.quick)
            measure(bench, names, limits, options.quick, results)
        finally:
            document = report.document(results, options.quick)
            document["runtime_dir"] = environment["OVERMIND_RUNTIME_DIR"]
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
            print(report.table(document))
            print(f"written: {options.json}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
