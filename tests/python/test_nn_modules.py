# SPDX-License-Identifier: MIT
"""Modules are kept without their empty tables of hooks, and come back as pickle would give them."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from overmind import _core, skeleton
from overmind.quirks import nn_modules
from segments import copy_of
from torch import nn
from transformers import BertConfig, BertModel

TABLES = [name for name, kind in nn_modules.tables() if kind is not None]


def described(module: Any) -> list[tuple[Any, ...]]:
    """Attributes in their order; of each the type, and what containers hold but for weights."""
    return [
        (name, type(value), list(value) if isinstance(value, (dict, set)) else None)
        for name, value in module.__dict__.items()
    ]


def _hooked() -> nn.Module:
    module = nn.Linear(2, 3)
    module.register_forward_hook(print)
    module.register_state_dict_pre_hook(print)
    return module


def _with_buffer() -> nn.Module:
    module = nn.Linear(2, 3)
    module.register_buffer("seen", torch.zeros(2), persistent=False)
    module.own, module.nothing = "value", {}
    return module


class Late(nn.Linear):
    """Sets an attribute before the constructor does."""

    def __init__(self) -> None:
        self.__dict__["early"] = 1
        super().__init__(2, 3)


def _attributes_on_a_table() -> nn.Module:
    module = nn.Linear(2, 3)
    module._forward_hooks.note = "kept"  # type: ignore[attr-defined]
    return module


def _other_type() -> nn.Module:
    module = nn.Linear(2, 3)
    module._forward_hooks = {}  # type: ignore[assignment]
    return module


class OwnState(nn.Linear):
    """Looks for a table in the state that it is given."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.seen = "_forward_hooks" in state


MODULES = {
    "plain": lambda: nn.Linear(2, 3),
    "frozen": lambda: nn.Linear(2, 3).eval().requires_grad_(False),
    "hooked": _hooked,
    "buffer": _with_buffer,
    "late": Late,
    "without": lambda: nn.Dropout(0.1),
    "nested": lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.ModuleList([nn.Linear(1, 1)])),
    "attributes": _attributes_on_a_table,
    "other type": _other_type,
    "lstm": lambda: nn.LSTM(2, 3),  # has a __setstate__ of its own
    "own state": lambda: OwnState(2, 3),
    # torch's own that extend that of nn.Module
    "convolution": lambda: nn.Conv2d(2, 3, 3, padding_mode="circular"),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "softmax": lambda: nn.Sequential(nn.Softmax(), nn.AvgPool3d(2)),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, 8),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_comes_back_as_pickle_gives_it(name: str) -> None:
    module = MODULES[name]()
    by_pickle = pickle.loads(pickle.dumps(module))
    restored = copy_of(module)
    for one, other in zip(restored.modules(), by_pickle.modules(), strict=True):
        assert type(one) is type(other) and described(one) == described(other)
        assert getattr(one._forward_hooks, "note", None) == getattr(other._forward_hooks, "note", None)
    for key, value in module.state_dict().items():
        assert torch.equal(value, restored.state_dict()[key])


def test_tables_that_modules_share_stay_shared() -> None:
    first = nn.Linear(2, 3)
    pair = copy_of([first, copy.copy(first)])
    assert [name for name in TABLES if pair[0].__dict__[name] is not pair[1].__dict__[name]] == []
    apart = copy_of([nn.Linear(2, 3), nn.Linear(2, 3)])
    assert [name for name in TABLES if apart[0].__dict__[name] is apart[1].__dict__[name]] == []


class Slotted(nn.Linear):
    __slots__ = ("extra",)


def _compiled(module: nn.Module) -> nn.Module:
    module.compile()
    return module


REFUSED = {
    "slots": (lambda: Slotted(2, 3), "__slots__"),
    "compiled": (lambda: _compiled(nn.Linear(2, 3)), "compiled in place"),
    "compiled model": (lambda: _compiled(BertModel(SMALL)), "compiled in place"),
    "compiled part": (lambda: nn.Sequential(_compiled(nn.ReLU())), "compiled in place"),
}
SMALL = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_s_own_pickle_drops_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(skeleton.Unsupported, match=reason):
        skeleton.take(make(), {}, [])


def test_empty_tables_take_no_bytes() -> None:
    skeletons = [skeleton.take(nn.ReLU(), {}, []).skeleton, skeleton.take([nn.ReLU(), nn.ReLU()], {}, []).skeleton]
    assert len(skeletons[1]) - len(skeletons[0]) < 40


def test_holds_only() -> None:
    kinds = {int, str}
    assert _core.holds_only({"a": 1}, kinds) and _core.holds_only([1, "a"], kinds) and _core.holds_only([], kinds)
    assert _core.holds_only([("a", 1), ("b", "c"), ()], kinds)
    for other in ({"a": None}, {None: 1}, [True], [("a", 1), "b"], ["b", ("a", 1)], [("a", 1.0)], [["a"]]):
        assert not _core.holds_only(other, kinds), other  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.holds_only(OrderedDict(), kinds)
