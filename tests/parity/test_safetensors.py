# SPDX-License-Identifier: MIT
"""safetensors.torch.load_file; native against cached."""

from __future__ import annotations

from typing import Any

import pytest
from fresh import Fresh
from parity.cases import Load, compare, fill

MAKE = """
import torch
from safetensors.torch import save_file
torch.manual_seed(0)
save_file({"b": torch.randn(3, 4), "a": torch.randn(2)}, made + "/two.safetensors", {"format": "pt", "note": "x"})
kinds = {str(dtype): torch.tensor([0, 1, 1, 0]).to(dtype)
         for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                       torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)}
save_file({**kinds, "empty": torch.empty(0, 3), "scalar": torch.tensor(7), "odd": torch.arange(7, dtype=torch.uint8)},
          made + "/kinds.safetensors")
save_file({}, made + "/nothing.safetensors")
save_file({f"layer.{i}": torch.full((3,), float(i)) for i in range(500)}, made + "/many.safetensors")
save_file({"w": torch.randn(600, 600)}, made + "/large.safetensors")
"""

LOADS = [
    Load("path", "safetensors.torch.load_file(made + '/two.safetensors')", "list(m)"),
    Load("path_object", "safetensors.torch.load_file(pathlib.Path(made) / 'two.safetensors')", setup="import pathlib"),
    Load("device_name", "safetensors.torch.load_file(made + '/two.safetensors', device='cpu')"),
    Load("names", "safetensors.torch.load_file(device='cpu', filename=made + '/two.safetensors')"),
    Load("kinds", "safetensors.torch.load_file(made + '/kinds.safetensors')"),
    Load("nothing", "safetensors.torch.load_file(made + '/nothing.safetensors')"),
    Load("many", "safetensors.torch.load_file(made + '/many.safetensors')"),
    Load("large", "safetensors.torch.load_file(made + '/large.safetensors')", "m['w'] @ m['w']"),
    Load("model", "safetensors.torch.load_file(tiny_llama + '/model.safetensors')"),
    Load("a_copy", "load_file(made + '/two.safetensors')", setup="from safetensors.torch import load_file"),
    Load("writes", "safetensors.torch.load_file(made + '/two.safetensors')", "[m['a'].add_(1), m['b'].resize_(2, 2)]"),
]


@pytest.fixture(scope="module")
def made(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> str:
    return fill(fresh, tmp_path_factory.mktemp("safetensors"), MAKE)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_safetensors(load: Load, oracle: Any, made: str) -> None:
    compare(oracle, load.prepared("import safetensors.torch"), made)
