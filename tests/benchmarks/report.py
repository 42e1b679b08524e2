# SPDX-License-Identifier: MIT
"""From samples to medians, goals and a table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from kernel_figures import PHASES
from scenarios import SCENARIOS, Scenario

PACKAGES = (
    "overmind-jupyter",
    "torch",
    "transformers",
    "diffusers",
    "safetensors",
    "tokenizers",
    "sentence-transformers",
)
MODES = ("plain", "miss", "hit")
BARE_LOADERS = ("torch.load", "overmind.load")
# A read is compared with this much room for noise; both medians are in the file.
READ_SHARE, READ_SECONDS = 1.05, 0.001

Samples = dict[str, list[dict[str, Any]]]


def goal(name: str, value: float, limit: float, unit: str) -> dict[str, Any]:
    """One line of "must be at most"."""
    return {"goal": name, "value": value, "limit": limit, "unit": unit, "passed": value <= limit}


def at_usual_speed(samples: Samples) -> Samples:
    """The samples with their loads, commits and reads at the machine's usual speed: times its median pace in these
    samples, by the pace right before and after each. Of 20 ordinary loads of MiniLM on a shared machine, 170 to 292 ms,
    that left a spread of a tenth; their medians of five moved by a third."""
    every = [sample for each in samples.values() for sample in each]
    usual = statistics.median(pace for sample in every for pace in sample["paces"].values())

    def scaled(sample: dict[str, Any]) -> dict[str, Any]:
        found = dict(sample)
        for part, pace in sample["paces"].items():
            found[part] = {name: seconds * usual / pace for name, seconds in sample[part].items()}
        if sample["committed"] is not None:
            found["committed"] = sample["committed"] * usual / sample["paces"]["load"]
        return found

    return {mode: [scaled(sample) for sample in each] for mode, each in samples.items()}


def scenario(spec: Scenario, measured: Samples) -> dict[str, Any]:
    samples = at_usual_speed(measured)
    names = list(samples["plain"][0]["load"])
    steps = {name: _medians(samples, [name]) for name in names}
    total = _medians(samples, names)
    return {
        "title": spec.title,
        "rounds": len(samples["plain"]),
        "nbytes": samples["plain"][0]["nbytes"],
        "steps": steps,
        "total": total,
        "committed": statistics.median(sample["committed"] for sample in samples["miss"]),
        "again": {name: {mode: _again(samples[mode], name) for mode in MODES} for name in samples["hit"][0]["again"]},
        "records_of_a_hit": samples["hit"][0]["records"],
        "goals": _load_goals(spec, total),
        "as_measured": _medians(measured, names),
        "samples": measured,
    }


def _again(samples: list[dict[str, Any]], name: str) -> float:
    return statistics.median(sample["again"][name] for sample in samples)


def _medians(samples: Samples, names: list[str]) -> dict[str, Any]:
    """Medians over the rounds of the sum over `names`."""

    def median(mode: str, *parts: str) -> float:
        return statistics.median(
            sum(sample[part][name] for part in parts for name in names) for sample in samples[mode]
        )

    found: dict[str, Any] = {
        mode: {"load": median(mode, "load"), "read": median(mode, "read"), "until_read": median(mode, "load", "read")}
        for mode in MODES
    }
    found["ratio"] = found["plain"]["load"] / found["hit"]["load"]
    found["ratio_until_read"] = found["plain"]["until_read"] / found["hit"]["until_read"]
    found["first_ratio"] = found["miss"]["load"] / found["plain"]["load"]
    return found


def _load_goals(spec: Scenario, total: dict[str, Any]) -> list[dict[str, Any]]:
    plain, hit = total["plain"]["load"], total["hit"]["load"]
    goals = []
    if spec.hit_ratio is not None:
        goals.append(goal(f"hit at most 1/{spec.hit_ratio:g} of plain", hit, plain / spec.hit_ratio, "s"))
    if spec.hit_seconds is not None:
        goals.append(goal(f"hit at most {spec.hit_seconds:g} s", hit, spec.hit_seconds, "s"))
    limit = max(1.10 * plain, plain + 0.05)
    goals.append(goal("first load at most 1.10 x plain or plain + 0.05 s", total["miss"]["load"], limit, "s"))
    limit = READ_SHARE * total["plain"]["read"] + READ_SECONDS
    goals.append(goal("a hit is read as fast as plain", total["hit"]["read"], limit, "s"))
    return goals


def memory(found: dict[str, Any]) -> dict[str, Any]:
    weights = max(1, found["weights_bytes"])
    copies = (found["pss_with_model"] - found["pss_without_model"]) / weights
    plain = (found["plain_pss_of_one_with_model"] - found["plain_pss_of_one_without_model"]) / weights
    return {
        "title": f"{found['processes']} processes with the fp32 Llama",
        **found,
        "copies": copies,
        "plain_copies_of_one_process": plain,
        "goals": [
            goal("PSS at most 1.05 copies", copies, 1.05, "copies"),
            goal("daemon without segments at most 20 MB", found["daemon_bytes"] / 1e6, 20.0, "MB"),
        ],
    }


def bare(rounds: list[dict[str, Any]], entries: int) -> dict[str, Any]:
    loaders: dict[str, Any] = {}
    goals = []
    for loader in BARE_LOADERS:
        found = {count: [each[loader][count]["median"] for each in rounds] for count in ("one", "many")}
        one, many = statistics.median(found["one"]), statistics.median(found["many"])
        change = statistics.median(many / one - 1 for one, many in zip(found["one"], found["many"], strict=True))
        loaders[loader] = {"one_entry": one, "many_entries": many, "change": change, "samples": found}
        goals.append(goal(f"{loader}: a bare hit at most 2 ms", one * 1e3, 2.0, "ms"))
        goals.append(goal(f"{loader}: {entries:,} entries change it by at most 10 %", change, 0.10, "share"))
    return {
        "title": "hit of a tiny object",
        "rounds": len(rounds),
        "entries": entries,
        "loaders": loaders,
        "goals": goals,
    }


def kernels(found: dict[str, Any]) -> dict[str, Any]:
    restarts = {
        way: [statistics.median(phase) for phase in zip(*samples, strict=True)]
        for way, samples in found["restarts"]["samples"].items()
    }
    total = {way: statistics.median(map(sum, samples)) for way, samples in found["restarts"]["samples"].items()}
    answers = {
        way: {name: statistics.median(each) for name, each in samples.items()}
        for way, samples in found["answers"]["samples"].items()
    }
    scripts = {name: statistics.median(each) for name, each in found["scripts"]["samples"].items()}
    theirs, own = answers["ipykernel"], answers["warm"]
    goals = [
        goal("restart to loaded pipeline at most 1/25 of ipykernel's", total["warm"], total["ipykernel"] / 25, "s"),
        goal("restart to loaded pipeline at most 0.6 s", total["warm"], 0.6, "s"),
        goal("the same without a zygote at most ipykernel's", total["cold"], total["ipykernel"], "s"),
        goal("fresh start at most 0.45 s", own["start"], 0.45, "s"),
        *(goal(f"{name}: at most ipykernel's", own[name], theirs[name], "s") for name in own if name != "start"),
        goal("script at most 1/20 of python's", scripts["overmind run"], scripts["python"] / 20, "s"),
    ]
    return {
        "title": "kernels and scripts",
        "rounds": len(found["restarts"]["samples"]["warm"]),
        "restarts": restarts,
        "total": total,
        "answers": answers,
        "scripts": scripts,
        "idle_bytes": found["restarts"]["idle_bytes"],
        "goals": goals,
        "samples": {part: found[part]["samples"] for part in found},
    }


def document(results: dict[str, Any], quick: bool) -> dict[str, Any]:
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "quick": quick,
        **_machine(),
        "results": results,
    }


def _machine() -> dict[str, Any]:
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kib = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "machine": {
            "cpu": models[0] if models else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory_kib[0] * 1024 if memory_kib else None,
            "kernel": platform.release(),
            "load_average": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": _commit(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


# --- the table -----------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """Three figures, in the unit that people read."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def table(found: dict[str, Any]) -> str:
    results = found["results"]
    lines = []
    if any(name in SCENARIOS for name in results):
        head = ["load", "n", "plain", "hit", "ratio", "plain read", "hit read", "ratio", "first", "/plain", "committed"]
        rows = [row for name in results if name in SCENARIOS for row in _load_rows(name, results[name])]
        lines += [*_grid([head, *rows]), ""]
    for result in results.values():
        for step, modes in result.get("again", {}).items():
            lines.append(f"{step}, once more: plain {seconds(modes['plain'])}, after a hit {seconds(modes['hit'])}")
    if "memory" in results:
        copies, daemon = results["memory"]["copies"], results["memory"]["daemon_bytes"] / 1e6
        lines.append(f"{results['memory']['title']}: {copies:.3f} copies of its weights; daemon {daemon:.1f} MB")
    if "bare" in results:
        for loader, values in results["bare"]["loaders"].items():
            lines.append(
                f"bare hit, {loader}: {seconds(values['one_entry'])}; with {results['bare']['entries']:,} entries "
                f"{seconds(values['many_entries'])} ({values['change']:+.1%})"
            )
    if "kernels" in results:
        lines += _kernel_lines(results["kernels"])
    lines.append("")
    for name, result in results.items():
        for entry in result["goals"]:
            mark = "met   " if entry["passed"] else "MISSED"
            lines.append(
                f"{mark} {name}: {entry['goal']}: {entry['value']:.4g} (limit {entry['limit']:.4g}) {entry['unit']}"
            )
    if found["quick"]:
        lines.append("quick run on small models: the figures mean nothing")
    return "\n".join(lines)


def _kernel_lines(found: dict[str, Any]) -> list[str]:
    head = ["restart", *PHASES, "all"]
    rows = [[way, *map(seconds, phases), seconds(found["total"][way])] for way, phases in found["restarts"].items()]
    names = list(found["answers"]["warm"])
    answers = [[way, *(seconds(values[name]) for name in names)] for way, values in found["answers"].items()]
    python, ours = found["scripts"]["python"], found["scripts"]["overmind run"]
    return [
        "",
        *_grid([head, *rows]),
        "",
        *_grid([["kernel", *names], *answers]),
        "",
        f"script: python {seconds(python)}, overmind run {seconds(ours)} ({python / ours:.1f}x); "
        f"idle zygote and standby: PSS {found['idle_bytes'] / 1e6:.0f} MB",
    ]


def _load_rows(name: str, result: dict[str, Any]) -> list[list[str]]:
    rows = [_row(name, str(result["rounds"]), result["total"], seconds(result["committed"]))]
    if len(result["steps"]) > 1:
        rows += [_row(f"  {step}", "", medians, "") for step, medians in result["steps"].items()]
    return rows


def _row(name: str, rounds: str, medians: dict[str, Any], committed: str) -> list[str]:
    plain, hit = medians["plain"], medians["hit"]
    return [
        name,
        rounds,
        seconds(plain["load"]),
        seconds(hit["load"]),
        f"{medians['ratio']:.1f}x",
        seconds(plain["until_read"]),
        seconds(hit["until_read"]),
        f"{medians['ratio_until_read']:.1f}x",
        seconds(medians["miss"]["load"]),
        f"{medians['first_ratio']:.2f}",
        committed,
    ]


def _grid(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    drawn = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        drawn.append("  ".join(cells).rstrip())
    return [drawn[0], "-" * len(drawn[0]), *drawn[1:]]
