# SPDX-License-Identifier: MIT
"""S03: hooks, lambdas, local classes, and forwards that accelerate replaced.

`device_map=` makes accelerate put its own `forward` and an `_hf_hook` on every module; disk offload leaves meta
tensors and a table of files in the user's offload folder. A cache that pickles the result says "Can't pickle <function
Embedding.forward>: it's not the same object" or gives a model that dies with "Cannot copy out of meta tensor". Custom
loaders return modules with lambda hooks or classes made inside a function, which no other process can import.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

MYLIB = """
import torch
from torch import nn


def _linear(path):
    net = nn.utils.skip_init(nn.Linear, 3, 2)
    net.load_state_dict(torch.load(path))
    return net


def with_lambda_hook(path):
    net = _linear(path)
    net.register_forward_hook(lambda module, args, out: out + 100)
    return net


def plus_ten(module, args, out):
    return out + 10


def with_named_hooks(path):
    net = nn.Sequential(_linear(path))
    net.register_forward_hook(plus_ten)
    net[0].register_forward_pre_hook(print_nothing, with_kwargs=True)
    return net


def print_nothing(module, args, kwargs):
    return args, kwargs


def with_local_class(path):
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = _linear(path)

        def forward(self, x):
            return self.inner(x) + 1000

    return Local()


def with_own_forward(path):
    net = _linear(path)
    plain = net.forward
    net.forward = lambda x: plain(x) * 3
    return net


def with_bound_method(path):
    net = _linear(path)
    net.first = net.forward
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
    return start + "import mylib\nx = torch.ones(1, 3)\n"


def test_device_map_of_one_device(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
from transformers import BertForMaskedLM
m = BertForMaskedLM.from_pretrained(root + "/m", device_map={"": "cpu"})
hooks = sorted(name for name, part in m.named_modules() if hasattr(part, "_hf_hook"))
value = [dict(getattr(m, "hf_device_map", {})), hooks,
         describe(m(input_ids=torch.tensor([[1, 2, 3]])).logits), describe(m)]
"""
    )
    assert run.value[:2] == [{}, []], "measured: transformers 5.24 sets neither for one device"


OFFLOADED = """
from transformers import BertForMaskedLM
m = BertForMaskedLM.from_pretrained(
    root + "/m", device_map={"bert.embeddings": "cpu", "bert.encoder": "disk", "cls": "cpu"}, offload_folder=offload)
out = describe(m(input_ids=torch.tensor([[1, 2, 3]])).logits)
hooked = sorted(name for name, part in m.named_modules() if hasattr(part, "_hf_hook"))
on_disk = sorted(name for name, weight in m.named_parameters() if weight.device.type == "meta")
value = [dict(m.hf_device_map), hooked, out, on_disk]
"""


def test_disk_offload(oracle: Oracle, before: str, folder: Path) -> None:
    run = oracle.by(before + f"offload = {str(folder / 'offload')!r}" + OFFLOADED)
    assert run.value[0]["bert.encoder"] == "disk"
    assert "bert.encoder.layer.0.output.dense.weight" in run.value[3]


def test_disk_offload_survives_another_kernel_that_cleans_up(oracle: Oracle, before: str, folder: Path) -> None:
    """One kernel deletes its offload folder; the next has its own, and its weights must be readable."""

    def body(name: str) -> str:
        return before + f"offload = {str(folder / name)!r}" + OFFLOADED

    native = oracle.nat(body("native")).value
    assert oracle.run(body("one") + "\nimport shutil\nshutil.rmtree(offload, ignore_errors=True)").value == native
    assert oracle.run(body("two")).value == native
    assert oracle.run(body("one")).value == native, "the same folder again, deleted in between"


def test_a_folder_that_offload_can_not_do_without(oracle: Oracle, before: str) -> None:
    """No offload_folder: whatever the native load does, does it here."""
    body = (
        before
        + """
from transformers import BertForMaskedLM
try:
    m = BertForMaskedLM.from_pretrained(root + "/m", device_map={"bert": "disk", "cls": "cpu"})
    value = ["loaded", sorted(str(place) for place in m.hf_device_map.values())]
except Exception as error:
    value = [type(error).__name__, str(error)]
"""
    )
    native = oracle.nat(body).value
    assert oracle.run(body).value == native
    assert oracle.run(body).value == native


@pytest.mark.parametrize(
    "loader, right",
    [("with_lambda_hook", 103.0), ("with_local_class", 1003.0), ("with_own_forward", 9.0), ("with_named_hooks", 13.0)],
)
def test_what_custom_loaders_hang_on_a_module(oracle: Oracle, before: str, loader: str, right: float) -> None:
    run = oracle.by(before + f"m = load(mylib.{loader}, root + '/w.pt')\nvalue = [m(x).tolist(), type(m).__qualname__]")
    assert run.value[0] == [[right, right]]


def test_named_hooks_are_a_hit_and_removable(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
m = load(mylib.with_named_hooks, root + "/w.pt")
was = m(x).tolist()
handle = m.register_forward_hook(lambda module, args, out: out + 500)
more = m(x).tolist()
handle.remove()
value = [was, more, m(x).tolist(), len(m._forward_hooks), len(m[0]._forward_pre_hooks)]
"""
    )
    assert run.value == [[[13.0] * 2], [[513.0] * 2], [[13.0] * 2], 1, 1]


def test_a_stored_bound_method_is_bound_to_the_new_module(oracle: Oracle, before: str) -> None:
    run = oracle.by(
        before
        + """
m = load(mylib.with_bound_method, root + "/w.pt")
with torch.no_grad():
    m.weight.zero_()
value = [m.first.__self__ is m, m.first(x).tolist()]
"""
    )
    assert run.value == [True, [[0.0, 0.0]]]
