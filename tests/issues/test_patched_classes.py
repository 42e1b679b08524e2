# SPDX-License-Identifier: MIT
"""A notebook that changes a library's class gets what a native load gives it, and nobody else does."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

LOAD = """
from transformers import BertForMaskedLM
model = BertForMaskedLM.from_pretrained(root + "/m")
value = [getattr(model, "own", None), getattr(model.cls.predictions.decoder, "own", None),
         type(model.bert.pooler).__name__, describe(model)]
"""

PATCHES = {
    "the initialiser": """
from transformers import BertForMaskedLM as patched
plain = patched.__init__
def start(self, *args, **kwargs):
    plain(self, *args, **kwargs)
    self.own = "a"
patched.__init__ = start
""",
    "a base class": """
import functools
plain = torch.nn.Linear.__init__
@functools.wraps(plain)
def start(self, *args, **kwargs):
    plain(self, *args, **kwargs)
    self.own = "b"
torch.nn.Linear.__init__ = start
""",
    "wrapped by a library": """
from transformers import BertForMaskedLM as patched
plain = patched.post_init
def tell(self):
    plain(self)
    self.own = "c"
patched.post_init = torch.no_grad()(tell)
""",
    "a partialmethod": """
import functools
from transformers import BertForMaskedLM as patched
plain = patched.__init__
def start(self, mark, *args, **kwargs):
    plain(self, *args, **kwargs)
    self.own = mark
patched.__init__ = functools.partialmethod(start, "d")
""",
    "an object that is called": """
from transformers import BertForMaskedLM as patched
plain = patched.post_init
class Tell:
    def __get__(self, instance, owner=None):
        def tell():
            plain(instance)
            instance.own = "e"
        return tell
patched.post_init = Tell()
""",
    "another class in its place": """
from transformers.models.bert import modeling_bert
class Other(modeling_bert.BertLMPredictionHead):
    pass
modeling_bert.BertLMPredictionHead = Other
""",
}


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    start = rooted(folder)
    oracle.nat(start + "import tiny\ntiny.bert(root + '/m', seed=1)\n")
    return start


@pytest.mark.parametrize("name", PATCHES)
def test_a_patched_class_is_loaded_natively(oracle: Oracle, before: str, name: str) -> None:
    stock, patched = before + LOAD, before + PATCHES[name] + LOAD
    natively, patched_natively = oracle.nat(stock).value, oracle.nat(patched).value
    first = oracle.run(patched)
    assert first.value == patched_natively
    assert first.records[-1][0] == "bypass" and first.records[-1][1]
    assert oracle.run(stock).value == natively, "nothing of the patched load was kept"
    second = oracle.run(patched)
    assert second.value == patched_natively, "the stock entry was not taken"
    assert second.records[-1][0] == "bypass" and "in this process" in second.records[-1][1]
    third = oracle.run(stock)
    assert third.value == natively and third.records[-1][0] == "hit", "the entry was left in peace"


def test_another_forward_changes_no_load(oracle: Oracle, before: str) -> None:
    patch = """
from transformers import BertForMaskedLM as patched
plain = patched.forward
def forward(self, *args, **kwargs):
    return plain(self, *args, **kwargs)
patched.forward = forward
"""
    assert oracle.hit(before + patch + LOAD).records[-1][0] == "hit"
