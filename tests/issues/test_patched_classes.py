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
         type(model.bert.encoder.layer[0].intermediate.intermediate_act_fn).__name__, sorted(model._no_split_modules),
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
    "another name of a class": """
from my_layers import Fast
torch.nn.Linear = Fast
""",
    "a table of classes": """
from my_layers import Quick
from transformers.activations import ACT2FN
ACT2FN["gelu"] = Quick
""",
    "another base": """
from my_layers import Tagged
from transformers import BertPreTrainedModel as patched
patched.__bases__ = (Tagged, *patched.__bases__)
""",
    "a function of torch": """
import torch
plain = torch.arange
torch.arange = lambda *args, **kwargs: plain(*args, **kwargs) + 1
""",
    "another class in its place": """
from transformers.models.bert import modeling_bert
class Other(modeling_bert.BertLMPredictionHead):
    pass
modeling_bert.BertLMPredictionHead = Other
""",
}


# What no file of the user's tells: layers of an installed package, plain values.
CHANGES = {
    "a package's class in its place": """
sys.path.insert(0, root + "/dist-packages")
import faster
from transformers.models.bert import modeling_bert
modeling_bert.BertLMPredictionHead = faster.Head
""",
    "a package's class under another name": """
sys.path.insert(0, root + "/dist-packages")
import faster
torch.nn.Linear = faster.Fast
""",
    "a package's function, on a cluster": """
sys.path.insert(0, root + "/apps/faster/site-packages")
import faster
from transformers import BertForMaskedLM as patched
patched.post_init = faster.post_init
""",
    "another code": """
from transformers.models.bert import modeling_bert
class Other(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.decoder.own = "code"
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
modeling_bert.BertLMPredictionHead.__init__.__code__ = Other.__init__.__code__
""",
    "other defaults": """
import torch
torch.nn.LayerNorm.__init__.__defaults__ = (1e-5, True, False, None, None)
""",
    "a package's base": """
sys.path.insert(0, root + "/dist-packages")
import faster
from transformers import BertPreTrainedModel as patched
patched.__bases__ = (faster.Tagged, *patched.__bases__)
""",
    "a plain attribute": """
from transformers import BertForMaskedLM as patched
patched._no_split_modules = ["Other"]
""",
    "a plain attribute, in place": """
from transformers import BertPreTrainedModel as patched
patched._no_split_modules = ["other"]
patched._no_split_modules.append("BertLayer")
""",
}

LAYERS = """
import torch
class Fast(torch.nn.Linear):
    own = "fast"
class Quick(torch.nn.GELU):
    pass
class Tagged:
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        self.__dict__["own"] = "tagged"
"""

PACKAGE = """
import torch
from transformers import BertForMaskedLM
from transformers.models.bert.modeling_bert import BertLMPredictionHead
class Fast(torch.nn.Linear):
    own = "faster"
class Tagged:
    own = "tagged"
class Head(BertLMPredictionHead):
    pass
def post_init(self, plain=BertForMaskedLM.post_init):
    plain(self)
    self.own = "f"
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    (folder / "my_layers.py").write_text(LAYERS)
    for place in ("dist-packages", "apps/faster/site-packages"):  # the second as PYTHONPATH may name it
        (folder / place).mkdir(parents=True)
        (folder / place / "faster.py").write_text(PACKAGE)
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


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_by_others_is_kept_apart(oracle: Oracle, before: str, name: str) -> None:
    stock, patched = before + LOAD, before + CHANGES[name] + LOAD
    natively, patched_natively = oracle.nat(stock).value, oracle.nat(patched).value
    assert natively != patched_natively
    assert oracle.run(patched).value == patched_natively
    again = oracle.run(patched)
    assert again.value == patched_natively and again.records[-1][0] == "hit"
    other = oracle.run(stock)
    assert other.value == natively and other.records[-1][0] == "miss"
    assert "changed" in other.records[-1][1] or "faster" in other.records[-1][1]
    for source, value in ((stock, natively), (patched, patched_natively), (stock, natively)):
        run = oracle.run(source)
        assert run.value == value and run.records[-1][0] == "hit", "neither throws the other's entry out"


def test_three_kinds_of_processes_have_an_entry_each(oracle: Oracle, before: str) -> None:
    sources = [before + LOAD] + [
        before + f"from transformers import BertForMaskedLM as patched\npatched._no_split_modules = [{name!r}]\n" + LOAD
        for name in ("one", "other")
    ]
    values = [oracle.nat(source).value for source in sources]
    for expected in ("miss", "hit", "hit"):
        for source, value in zip(sources, values, strict=True):
            run = oracle.run(source)
            assert run.value == value and run.records[-1][0] == expected


def test_an_entry_of_changed_files_is_given_up_under_both_keys(oracle: Oracle, before: str) -> None:
    stock, patched = before + LOAD, before + CHANGES["a plain attribute"] + LOAD
    for source in (stock, patched):
        oracle.run(source)
    oracle.nat(before + "import tiny\ntiny.bert(root + '/m', seed=2)\n")
    for source in (patched, stock):
        assert oracle.run(source).value == oracle.nat(source).value
        assert oracle.run(source).records[-1][0] == "hit"


def test_another_forward_changes_no_load(oracle: Oracle, before: str) -> None:
    patch = """
from transformers import BertForMaskedLM as patched
plain = patched.forward
def forward(self, *args, **kwargs):
    return plain(self, *args, **kwargs)
patched.forward = forward
"""
    assert oracle.hit(before + patch + LOAD).records[-1][0] == "hit"


def test_functions_of_cython_are_their_modules(oracle: Oracle, folder: Path) -> None:
    """All functions that Cython compiled have one class, which lies in a module of no package."""
    (folder / "seeded.py").write_text("import numpy as np\ndef make():\n    return np.random.default_rng(5)\n")
    start = rooted(folder) + "import seeded\n"
    oracle.nat(start)  # and the file is older than the processes that follow
    body = start + "value = list(load(seeded.make).random(3))"
    native, *runs = oracle.nat(body), oracle.run(body), oracle.run(body)
    assert [run.outcomes for run in runs] == [["miss"], ["hit"]], [run.reasons for run in runs]
    assert [run.value for run in runs] == [native.value, native.value]


SCHEDULER = """
import json, os
import diffusers
os.makedirs(root + "/s", exist_ok=True)
def scheduler():
    made = diffusers.DDIMScheduler.from_pretrained(root + "/s")
    return [made.config.clip_sample_range, made.config.trained_betas]
"""
DEFAULTS = """
plain = diffusers.DDIMScheduler.__init__.__wrapped__
def set_default(name, value):
    code, defaults = plain.__code__, list(plain.__defaults__)
    defaults[code.co_varnames[1 : code.co_argcount].index(name)] = value
    plain.__defaults__ = tuple(defaults)
"""


@pytest.mark.parametrize("change", ["'clip_sample_range', 7.0", "'trained_betas', [0.1]"])
def test_the_defaults_of_a_wrapped_method_are_noticed(oracle: Oracle, folder: Path, change: str) -> None:
    """register_to_config() wraps the __init__ of all that diffusers makes from a config."""
    (folder / "s").mkdir()
    (folder / "s" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    start = rooted(folder) + SCHEDULER
    oracle.nat(start)  # and the file is older than the processes that follow
    stock, changed = start + "value = scheduler()", start + DEFAULTS + f"set_default({change})\nvalue = scheduler()"
    natively = oracle.nat(changed).value
    assert natively != oracle.nat(stock).value
    assert [oracle.run(stock).outcomes, oracle.run(stock).outcomes] == [["miss"], ["hit"]]
    assert oracle.run(changed).value == natively
    late = start + DEFAULTS + f"first = scheduler()\nset_default({change})\nvalue = scheduler()"
    assert oracle.run(late).value == natively


MINE = """
def keywords(x, *, y=3):
    return [x, y]
def plain(x, y=3):
    return [x, y]
class Thing:
    def __new__(cls, x, *, y=3):
        made = object.__new__(cls)
        made.y = y
        return made
"""


def test_keyword_defaults_may_be_set_where_they_are(oracle: Oracle, folder: Path) -> None:
    start = rooted(folder)
    (folder / "mine.py").write_text(MINE)
    body = (
        start
        + """
import mine
def both():
    return load(mine.keywords, 1) + load(mine.plain, 1) + [load(mine.Thing, 1).y]
value = [both(), both()]
mine.keywords.__kwdefaults__["y"] = 9
mine.plain.__defaults__ = (11,)
mine.Thing.__new__.__kwdefaults__ = {"y": 13}
value.append(both())
mine.plain.__defaults__ = (12,)
value.append(both())
"""
    )
    oracle.nat(start + "import mine")  # and the file is older than the processes that follow
    right = [[1, 3, 1, 3, 3], [1, 3, 1, 3, 3], [1, 9, 1, 11, 13], [1, 9, 1, 12, 13]]
    for run in (oracle.nat(body), oracle.run(body), oracle.run(body)):
        assert run.value == right, run.reasons
