# SPDX-License-Identifier: MIT
"""S08: Python attributes of parameters and tensors are lost.

Libraries hang facts on tensors: bitsandbytes a `quant_state`, transformers `_is_hf_initialized`. Reducers that rebuild
a tensor from dtype, shape and storage drop them (a plain pickle keeps them), and the quantised layer later fails far
from the load.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

MYLIB = """
import torch
from torch import nn


class Tagged(torch.Tensor):
    pass


class Packed(nn.Parameter):
    pass


def tagged(path):
    net = nn.utils.skip_init(nn.Linear, 3, 2)
    net.load_state_dict(torch.load(path))
    net.weight.quant_state = {"bits": 4, "absmax": torch.ones(2), "owner": None}
    net.register_buffer("seen", torch.zeros(2))
    net.seen.tag = ("a", 1)
    net.register_buffer("kind", torch.ones(2).as_subclass(Tagged))
    net.kind.note = "kept"
    net.weight.shape_before = torch.Size([1, 2])
    return net


def cyclic(path):
    net = tagged(path)
    net.weight.quant_state["owner"] = net.weight
    net.seen.tag = [net.seen]
    return net


def packed(path):
    net = tagged(path)
    parameter = Packed(torch.full((2,), 3.0), requires_grad=False)
    parameter.shape_before = torch.Size([1, 2])
    net.register_parameter("packed", parameter)
    return net
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    (folder / "mylib.py").write_text(MYLIB)
    start = rooted(folder)
    oracle.nat(
        start
        + "import tiny\ntiny.bert(root + '/m', seed=1)\n"
        + "torch.save({'weight': torch.ones(2, 3), 'bias': torch.zeros(2)}, root + '/w.pt')"
    )
    return start + "import mylib\n"


def test_attributes_of_a_custom_loader(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
m = load(mylib.tagged, root + "/w.pt")
state = m.weight.quant_state
value = [state["bits"], state["absmax"].tolist(), list(m.seen.tag), m.kind.note,
         type(m.kind).__name__, list(m.weight.shape_before), type(m.weight.shape_before).__name__, describe(m)]
"""
    )
    assert run.value[:7] == [4, [1.0, 1.0], ["a", 1], "kept", "Tagged", [1, 2], "Size"]


def test_an_attribute_that_leads_back_to_its_tensor(oracle: Oracle, before: str) -> None:
    """A bypass is right: pickle itself gives such a tensor back without any attribute, and says nothing."""
    run = oracle.by(
        before
        + """
m = load(mylib.cyclic, root + "/w.pt")
state = m.weight.quant_state
value = [state["bits"], state["owner"] is m.weight, m.seen.tag[0] is m.seen]
"""
    )
    assert run.value == [4, True, True]


def test_a_subclass_of_parameter(oracle: Oracle, before: str) -> None:
    """A bypass is right: torch's own pickling of a Parameter makes a plain one of it."""
    run = oracle.by(
        before
        + """
m = load(mylib.packed, root + "/w.pt")
value = [type(m.packed).__name__, list(m.packed.shape_before), m.packed.requires_grad, m.weight.quant_state["bits"],
         sorted(name for name, _ in m.named_parameters())]
"""
    )
    assert run.value == ["Packed", [1, 2], False, 4, ["bias", "packed", "weight"]]


def test_attributes_after_from_pretrained(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
from transformers import BertForMaskedLM
m = BertForMaskedLM.from_pretrained(root + "/m")
value = [sorted({name for p in m.parameters() for name in vars(p)}),
         sorted({name for b in m.buffers() for name in vars(b)})]
was = {name: p.detach().clone() for name, p in m.named_parameters()}
m.init_weights()
value.append(all(torch.equal(p, was[name]) for name, p in m.named_parameters()))
"""
    )
    assert run.value[0] == ["_is_hf_initialized"]
    assert run.value[2] is True, "init_weights() leaves loaded weights alone"


def test_attributes_of_a_cast_model(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
from transformers import BertForMaskedLM
m = BertForMaskedLM.from_pretrained(root + "/m", dtype=torch.bfloat16)
value = [[name, sorted(vars(p))] for name, p in m.named_parameters()]
"""
    )
    assert all(attributes == ["_is_hf_initialized"] for _name, attributes in run.value)


def test_attributes_through_torch_load(oracle: Oracle, before: str) -> None:
    oracle.nat(
        before + "t = torch.ones(3)\nt.tag = [1, 'x']\np = torch.nn.Parameter(torch.ones(2))\np.state = {'bits': 8}\n"
        "torch.save([t, p], root + '/tagged.pt')"
    )
    run = oracle.hit(
        before
        + "t, p = torch.load(root + '/tagged.pt', weights_only=False)\nvalue = [vars(t), vars(p), describe([t, p])]"
    )
    assert run.value[:2] == [{"tag": [1, "x"]}, {"state": {"bits": 8}}]
