# SPDX-License-Identifier: MIT
"""`make bench` works: small models, few rounds. Its figures are not looked at, only that they are all there."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import models
import pytest
from conftest import processes_of

RUN = models.ROOT / "tests" / "benchmarks" / "run.py"
LOADS = {
    "pipeline": {"vae", "controlnet_a", "controlnet_b", "pipeline"},
    "llama_bf16": {"llama_bfloat16"},
    "llama_fp32": {"llama_float32"},
    "llama_bin": {"torch.load"},
    "llama_4bit": {"bitsandbytes"},
    "llama_8bit": {"bitsandbytes"},
    "script": {"torch.jit.load"},
    "tokenizer128k": {"tokenizer"},
    "minilm": {"SentenceTransformer"},
    **({"stable_fast": {"stable-fast"}} if importlib.util.find_spec("sfast") else {}),
}


def bench(tmp_path: Path, *arguments: str) -> tuple[dict[str, object], str]:
    written = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--quick", "--models", str(tmp_path), "--json", str(written), *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(written.read_text()), done.stdout


@pytest.mark.timeout(1200)
def test_quick_run_measures_everything(tmp_path: Path) -> None:
    document, table = bench(tmp_path)
    results = document["results"]
    assert isinstance(results, dict)
    assert set(results) == {*LOADS, "memory", "bare", "kernels"}
    assert set(results["kernels"]["restarts"]) == {"ipykernel", "cold", "warm", "bare"}
    for name, steps in LOADS.items():
        result = results[name]
        assert set(result["steps"]) == steps
        assert {mode: len(samples) for mode, samples in result["samples"].items()} == {"plain": 1, "miss": 1, "hit": 1}
        for step in (*result["steps"].values(), result["total"]):
            for mode in ("plain", "miss", "hit"):
                assert all(value > 0 and math.isfinite(value) for value in step[mode].values())
        assert "hit" in {outcome for _, outcome, _ in result["records_of_a_hit"]}
    for result in results.values():
        assert result["goals"]
        for goal in result["goals"]:
            assert goal["passed"] is (goal["value"] <= goal["limit"])
            assert goal["goal"] in table
    assert document["machine"] and document["versions"]
    runtime = Path(str(document["runtime_dir"]))
    assert not runtime.exists()
    assert not processes_of(runtime), "the daemon of the run is left"


def test_refuses_an_unknown_name(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(RUN), "--only", "nothing"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr
