# SPDX-License-Identifier: MIT
"""Loads in a fork of a zygote: hits as in any process, equal to native."""

from __future__ import annotations

import os
from pathlib import Path

from starts import forked, native, warm, zygotes

TESTS = Path(__file__).resolve().parents[1]

PROGRAM = """
import gc, hashlib, sys
import torch
from transformers import BertForMaskedLM

def refuse():
    raise AssertionError("counting what a zygote froze takes 57 ms")

count = gc.get_freeze_count
frozen = count()
if frozen:
    gc.get_freeze_count = refuse
model = BertForMaskedLM.from_pretrained(sys.argv[1])
state = torch.load(sys.argv[2])
assert count() >= frozen // 2, "what the zygote froze stays frozen, but for what is freed"
out = model(input_ids=torch.tensor([[1, 2, 3]])).logits
print(hashlib.sha256(out.detach().numpy().tobytes()).hexdigest(), torch.rand(1).shape, model.training)
print(sorted(state), state["a"].sum().item(), state["a"].data_ptr() == state["b"].data_ptr())
if "overmind" in sys.modules:
    import overmind
    overmind.wait_published(60)
    print([record.outcome for record in overmind.history()], frozen > 0, file=sys.stderr)
"""


def test_hits_in_a_fork(runtime: Path, folder: Path) -> None:
    program, model, weights = folder / "program.py", folder / "model", folder / "w.pt"
    program.write_text(PROGRAM)
    make = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        f"import tiny, torch\ntiny.bert({str(model)!r}, seed=1)\n"
        f"a = torch.arange(5000.)\ntorch.save({{'a': a, 'b': a.view(50, 100)}}, {str(weights)!r})"
    )
    disabled = {**os.environ, "OVERMIND_DISABLE": "1"}
    assert native("-c", make, env=disabled).code == 0
    words = (str(program), str(model), str(weights))
    expected = native(*words, env=disabled)
    assert expected.code == 0, expected.err
    first = warm(runtime, *words)
    assert first.out == expected.out
    assert first.err.splitlines()[-1] == "['miss', 'miss'] False", first.err
    for _ in range(2):
        again = forked(runtime, *words)
        assert again.out == expected.out, again.err
        assert again.err.splitlines()[-1] == "['hit', 'hit'] True"
    assert len(zygotes(runtime)) == 1
