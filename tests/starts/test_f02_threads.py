# SPDX-License-Identifier: MIT
"""F02, F03: a fork of a process with torch in it computes as a fresh one does, and nothing touched a GPU before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starts import forked, has_torch, native, refused, warm, zygotes

PROGRAM = """
import os, sys, threading, time
import torch, numpy, tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers
print([each.name for each in threading.enumerate()], torch.get_num_threads(), torch.get_num_interop_threads())
print(torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized())
a = torch.ones(512, 512)
print(float((a @ a).sum()), float((numpy.ones((512, 512)) @ numpy.ones((512, 512))).sum()))
tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
print(sum(len(each.ids) for each in tokenizer.encode_batch(["a b " * 50] * 500)))
w = torch.ones(3, requires_grad=True); (w * 2).sum().backward(); print(w.grad)
"""


def test_torch_in_a_fork(runtime: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    expected = native(str(program))
    assert expected.code == 0, expected.err
    assert warm(runtime, str(program)) == expected
    (zygote,) = zygotes(runtime)
    assert refused(runtime) == {}
    assert len(os.listdir(f"/proc/{zygote['pid']}/task")) == 1
    held = [os.readlink(f"/proc/{zygote['pid']}/fd/{fd}") for fd in os.listdir(f"/proc/{zygote['pid']}/fd")]
    assert not [path for path in held if path.startswith("/dev/nvidia")]
    assert forked(runtime, str(program)) == expected
    seeds = tmp_path / "seeds.py"
    seeds.write_text("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), float(torch.rand(1)))\n")
    warm(runtime, str(seeds))
    numbers = [forked(runtime, str(seeds)).out.split() for _ in range(2)]
    assert not set(numbers[0]) & set(numbers[1])
    few = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert warm(runtime, str(program), env=few) == native(str(program), env=few)
    assert forked(runtime, str(program), env=few) == native(str(program), env=few)


LINES = [
    "torch.ones(600, 600) @ torch.ones(600, 600)",
    "torch.manual_seed(7)",
    "import tokenizers\ntokenizers.Tokenizer(tokenizers.models.BPE()).encode_batch(['a b'] * 5000)",
]


@pytest.mark.parametrize("line", LINES)
def test_an_import_that_computes(runtime: Path, tmp_path: Path, site_packages: Path, line: str) -> None:
    """A library that computes or seeds when it is imported is left to the program: no hang, no other numbers."""
    (site_packages / "overmind_computing_library.py").write_text(f"import torch\n{line}\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import tokenizers, torch, overmind_computing_library\n"
        "print(float((torch.ones(600, 600) @ torch.ones(600, 600)).sum()))\n"
        "print(torch.initial_seed() < 100 and torch.rand(2))\n"
        "model = tokenizers.models.WordLevel({'a': 0}, unk_token='a')\n"
        "print(len(tokenizers.Tokenizer(model).encode_batch(['a'] * 5000)))\n"
    )
    expected = native(str(program))
    assert warm(runtime, str(program)) == expected
    assert has_torch(zygotes(runtime)[0]["pid"])
    assert forked(runtime, str(program)) == expected
    assert "overmind_computing_library" in refused(runtime)
