# SPDX-License-Identifier: MIT
"""S09: a model from the cache can't be trained.

"element 0 of tensors does not require grad and does not have a grad_fn": the cache rebuilt the weights without
`requires_grad`. Its cousins: the training flag is another than after the native load, `.grad` is there before the
first step, or the step writes into the cached bytes and the next kernel starts from trained weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import BEFORE


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    start = f"root = {str(folder)!r}\n{BEFORE}\n"
    oracle.nat(
        start
        + "import tiny\ntiny.bert(root + '/m', seed=1)\n"
        + "torch.manual_seed(2)\nnet = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))\n"
        + "net[0].bias.requires_grad_(False)\ntorch.save(net, root + '/net.pt')"
    )
    return start + "from transformers import BertForMaskedLM\n"


TRAIN = """
m = BertForMaskedLM.from_pretrained(root + "/m")
state = describe(m)
value = [m.training, {str(p.requires_grad) for p in m.parameters()} == {"True"},
         all(p.grad is None for p in m.parameters())]
ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
step = torch.optim.SGD(m.parameters(), lr=0.5)
losses = []
for _ in range(4):
    step.zero_grad()
    loss = m(input_ids=ids, labels=ids).loss
    loss.backward()
    step.step()
    losses.append(loss.item())
value += [losses, state, describe(m)]
"""


def test_a_loaded_model_trains(oracle: Oracle, before: str) -> None:
    run = oracle.hit(before + TRAIN)
    training, all_require_grad, no_grads, losses, state, trained = run.value
    assert training is False and all_require_grad and no_grads
    assert losses[-1] < losses[0] - 0.1
    assert trained != state


def test_the_next_process_reads_the_original_weights(oracle: Oracle, before: str) -> None:
    """After training in two processes, one of them on a miss and one on a hit."""
    plain = before + "m = BertForMaskedLM.from_pretrained(root + '/m')\nvalue = describe(m)"
    original = oracle.nat(plain).value
    assert oracle.run(before + TRAIN).outcomes == ["miss"]
    third = oracle.run(plain)
    assert third.outcomes == ["hit"] and third.value == original
    assert oracle.run(before + TRAIN).outcomes == ["hit"]
    fourth = oracle.run(plain)
    assert fourth.outcomes == ["hit"] and fourth.value == original


def test_a_second_load_of_the_process_that_trains(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before + TRAIN + "value = [value[4], describe(BertForMaskedLM.from_pretrained(root + '/m')), value[5]]"
    )
    before_training, fresh, trained = run.value
    assert fresh == before_training != trained


def test_train_mode_statistics_and_frozen_parts(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
net = torch.load(root + "/net.pt", weights_only=False)
value = [net.training, [p.requires_grad for p in net.parameters()]]
torch.manual_seed(0)
net(torch.randn(8, 3)).sum().backward()
value += [net[0].bias.grad is None, describe(net[0].weight.grad), int(net[1].num_batches_tracked),
          describe(net[1].running_mean)]
again = torch.load(root + "/net.pt", weights_only=False)
value += [int(again[1].num_batches_tracked), again[1].running_mean.tolist()]
"""
    )
    assert run.value[:3] == [True, [True, False, True, True], True]
    assert run.value[4] == 1 and run.value[6:] == [0, [0.0] * 3]


def test_adam_half_precision_and_gradient_checkpointing(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
m = BertForMaskedLM.from_pretrained(root + "/m", dtype=torch.bfloat16)
m.gradient_checkpointing_enable()
m.train()
for module in m.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
adam = torch.optim.AdamW(m.parameters(), lr=0.01)
ids = torch.tensor([[1, 2, 3, 4]])
losses = []
for _ in range(3):
    loss = m(input_ids=ids, labels=ids).loss
    loss.backward()
    adam.step()
    adam.zero_grad()
    losses.append(loss.item())
value = [losses, str(next(m.parameters()).dtype), m.is_gradient_checkpointing]
"""
    )
    losses, dtype, checkpointing = run.value
    assert losses[-1] < losses[0] and dtype == "torch.bfloat16" and checkpointing is True
