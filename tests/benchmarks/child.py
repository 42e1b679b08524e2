# SPDX-License-Identifier: MIT
"""One measurement in one fresh process: prints one JSON line.

    child.py load SCENARIO MODE    MODE: plain, miss (first load), hit
    child.py hold MODE             MODE: none (imports only), plain, hit; keeps the fp32 Llama until stdin closes
    child.py fill COUNT            makes COUNT small entries
    child.py bare LOADER COUNT N   times COUNT hits of a tiny object by LOADER (torch.load, overmind.load), and COUNT
                                   more once another process has filled the catalog up to N entries

Every mode but plain proves by `overmind.history()` that the load went the way that is claimed.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scenarios import SCENARIOS, Scenario, folders, read_files

PAGE = 4096
COMMIT_SECONDS = 300.0


def pace() -> float:
    """How slow the machine is just now: seconds for a fixed piece of work. A neighbour on the host slows a virtual
    machine for seconds at a time, of one by 1.6, and loads with it."""
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        sum(number & 3 for number in range(40_000))
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def warm_memory(scenario: Scenario, mode: str, where: Any) -> None:
    """Touches what this load is about to need: the model's files in the page cache; free memory, as much as a plain
    load fills; and the segments of a hit. A virtual machine's host takes away what was not used for some seconds and
    gives it back slowly and unevenly: 2 GB of free memory took 0.2 s right after they were freed, 3 to 5 s later; the
    first read of 1.7 GB in the page cache took 10 to 280 ms."""
    size = int(scenario.fills * read_files(where, scenario.models))
    if size > 0:
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory[::PAGE] = bytes(len(range(0, size, PAGE)))
    if mode == "hit":
        from overmind import _core

        client = _core.Client(_core.config())  # not the one of the load, which connects when it needs it
        for entry in client.list():
            segment = client.open(entry["id"])
            for index in range(segment.buffer_count):
                bytes(segment.buffer(index)[::PAGE])


def storages(obj: Any) -> Iterator[Any]:
    """The storages of all weights of a loaded object."""
    import torch

    if isinstance(obj, torch.Tensor):
        yield obj.untyped_storage()
    elif isinstance(obj, torch.nn.Module):
        for tensor in (*obj.parameters(), *obj.buffers()):
            yield tensor.untyped_storage()
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from storages(value)
    elif hasattr(obj, "components"):
        yield from storages(obj.components)


def read_pages(obj: Any, seen: set[int]) -> tuple[int, int]:
    """Reads one byte of every page of every storage that is not in `seen`; (bytes covered, sum of what was read)."""
    import ctypes

    import numpy

    covered = total = 0
    for storage in storages(obj):
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in seen:
            continue
        seen.add(address)
        memory = numpy.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=numpy.uint8)
        total += int(memory[::PAGE].sum()) + int(memory[-1])
        covered += size
    return covered, total


def assert_outcome(before: int, mode: str, scenario: Scenario) -> list[list[str]]:
    """The records since `before`, after proving that the loads were what `mode` says."""
    import overmind

    new = overmind.history()[before:]
    outcomes = [record.outcome for record in new]
    right = (
        outcomes == [mode] if not scenario.nested else mode in outcomes and (mode == "miss" or "miss" not in outcomes)
    )
    if not right:
        told = "; ".join(f"{record.loader}({record.target}): {record.outcome} {record.reason}" for record in new)
        raise SystemExit(f"{scenario.name}: expected a {mode}, got {told or 'no record at all'}")
    return [[record.loader, record.outcome, record.reason] for record in new]


def timed_again(work: Callable[[], Any]) -> float:
    """Seconds of it, the best of five: torch's executor still optimises in the first ones."""
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def run_load(name: str, mode: str, where: Any) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    steps = scenario.prepare(where)
    if mode != "plain":
        import overmind

        overmind.enable()
    results: dict[str, Any] = {}
    load: dict[str, float] = {}
    records: list[list[str]] = []
    gc.collect()
    warm_memory(scenario, mode, where)
    paces = [pace()]
    start = time.perf_counter()
    for step in steps:
        before = len(overmind.history()) if mode != "plain" else 0
        begin = time.perf_counter()
        results[step.name] = step.load(results)
        load[step.name] = time.perf_counter() - begin
        if mode != "plain":
            records += assert_outcome(before, mode, scenario)
    paces.append(pace())
    committed = None
    if mode == "miss":
        if not overmind.wait_published(COMMIT_SECONDS):
            raise SystemExit(f"{name}: not committed within {COMMIT_SECONDS:.0f} s")
        committed = time.perf_counter() - start
    read: dict[str, float] = {}
    seen: set[int] = set()
    covered = checksum = 0
    for step in steps:
        begin = time.perf_counter()
        size, total = read_pages(results[step.name], seen)
        read[step.name] = time.perf_counter() - begin
        covered, checksum = covered + size, checksum + total
    paces.append(pace())
    return {
        "again": {step.name: timed_again(step.again) for step in steps if step.again is not None},
        "paces": {"load": statistics.mean(paces[:2]), "read": statistics.mean(paces[1:])},
        "load": load,
        "read": read,
        "committed": committed,
        "nbytes": covered,
        "checksum": checksum,
        "records": records,
    }


def run_hold(mode: str, where: Any) -> dict[str, Any]:
    import torch
    import transformers  # noqa: F401

    scenario = SCENARIOS["llama_fp32"]
    model = None
    covered = 0
    if mode == "none":
        # The classes that a load imports belong to the base line.
        scenario.prepare(where)
        torch.zeros(1)
        import numpy  # noqa: F401
    else:
        step = scenario.prepare(where)[0]
        if mode == "hit":
            import overmind

            overmind.enable()
        model = step.load({})
        if mode == "hit":
            assert_outcome(0, "hit", scenario)
        covered, _ = read_pages(model, set())
    gc.collect()
    print(json.dumps({"ready": True, "nbytes": covered}), flush=True)
    sys.stdin.read()
    del model
    return {}


def run_fill(count: int) -> dict[str, Any]:
    import overmind
    import small

    overmind.enable()
    for number in range(count):
        overmind.load(small.make, number)
    if not overmind.wait_published(COMMIT_SECONDS):
        raise SystemExit("the small entries were not committed")
    return {"entries": count}


def run_bare(loader: str, count: int, entries: int) -> dict[str, Any]:
    import overmind
    import small

    if loader == "torch.load":
        import torch

        path = os.environ["OVERMIND_BENCH_FILE"]
        overmind.enable()
        load = lambda: torch.load(path)  # noqa: E731
    else:
        overmind.enable()
        load = lambda: overmind.load(small.make, -1)  # noqa: E731
    load()
    if not overmind.wait_published(COMMIT_SECONDS):
        raise SystemExit("the tiny object was not committed")
    one = _bare_hits(loader, load, count)
    fill = [sys.executable, __file__, "fill", str(entries - 1), "--models", "."]
    subprocess.run(fill, check=True, stdout=subprocess.DEVNULL)
    return {"one": one, "many": _bare_hits(loader, load, count)}


def _bare_hits(loader: str, load: Callable[[], Any], count: int) -> dict[str, Any]:
    import overmind

    samples = []
    for _ in range(count):
        begin = time.perf_counter()
        load()
        samples.append(time.perf_counter() - begin)
        if overmind.history()[-1].outcome != "hit":
            raise SystemExit(f"{loader}: {overmind.history()[-1]}")
    samples.sort()
    return {"median": samples[count // 2], "p90": samples[count * 9 // 10], "samples": count}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "hold", "fill", "bare"])
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    where = folders(options.models, options.tiny)
    if options.what == "load":
        result = run_load(*options.arguments, where)
    elif options.what == "hold":
        result = run_hold(*options.arguments, where)
    elif options.what == "fill":
        result = run_fill(int(options.arguments[0]))
    else:
        loader, count, entries = options.arguments
        result = run_bare(loader, int(count), int(entries))
    if result:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
