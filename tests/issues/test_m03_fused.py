# SPDX-License-Identifier: MIT
"""M03: a LoRA that was fused stays fused for the next user.

Fusing adds s*BA to the weights in place, unfusing subtracts it, and in floating point that does not give the old bytes
back. Over shared weights a kernel that fused and died, or that unfused, leaves a changed model behind. A reload must
always give the bytes of the file.
"""

from __future__ import annotations

import signal
from pathlib import Path

from conftest import Oracle

LOAD = """
import os, tiny, torch
from describe import describe
from transformers import BertForMaskedLM
path = {path!r}
if not os.path.exists(path):
    tiny.bert(path, seed=3)
def load():
    return BertForMaskedLM.from_pretrained(path)
def weights(m):
    return describe([p.detach() for p in m.parameters()])
"""

FUSE = """
def fuse(m, sign):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.dim() == 2:
                p += sign * 0.7 * (torch.randn(p.shape[0], 2) @ torch.randn(2, p.shape[1]))
"""


def test_fused_and_killed(oracle: Oracle, folder: Path) -> None:
    load = LOAD.format(path=str(folder / "m"))
    pristine = oracle.hit(load + "value = weights(load())").value
    dead = oracle.run(
        load + FUSE + "m = load()\nfuse(m, 1)\nassert weights(m) != weights(load())\nos.kill(os.getpid(), 9)\n",
        check=False,
    )
    assert dead.returncode == -signal.SIGKILL
    after = oracle.run(load + "value = weights(load())")
    assert after.value == pristine and after.outcomes == ["hit"]


def test_unfused_and_reloaded(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(
        LOAD.format(path=str(folder / "m"))
        + FUSE
        + """
first = load()
pristine = weights(first)
fuse(first, 1)
fuse(first, -1)
exact = weights(first) == pristine
del first
value = [exact, weights(load()) == pristine, pristine]
"""
    )
    assert run.value[:2] == [False, True], "unfusing is not exact, a reload is"


def test_peft_merge_and_unload(oracle: Oracle, folder: Path) -> None:
    run = oracle.hit(
        LOAD.format(path=str(folder / "m"))
        + """
from peft import LoraConfig, get_peft_model
base = load()
pristine = weights(base)
torch.manual_seed(2)
m = get_peft_model(base, LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
merged = m.merge_and_unload()
value = [weights(merged) == pristine, weights(load()) == pristine]
again = get_peft_model(load(), LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
again.merge_adapter()
again.unmerge_adapter()
value += [weights(load()) == pristine, weights(merged)]
"""
    )
    assert run.value[:3] == [False, True, True]
