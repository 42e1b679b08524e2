# SPDX-License-Identifier: MIT
"""An nn.Module holds some ten tables of hooks, nearly always empty: pickle writes each of the 14,000 that a pipeline
has, which takes a fifth of the time that a first load has to be kept. They are left out and made anew instead.

What torch's own pickle of a module drops is refused: slots, and what `module.compile()` made.

Only where nobody can tell: of classes that are pickled as nn.Module itself is, in the order of its own constructor,
and tables that nothing but the module refers to (copy.copy() makes modules share theirs).
"""

from __future__ import annotations

import copyreg
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from overmind import _core

# Whose __setstate__ calls that of nn.Module, then sets what old pickles lack; it does not look for tables in the state.
# A pipeline of Stable Diffusion has 300 convolutions.
_EXTENDING = {f"torch.nn.modules.{name}" for name in ("activation", "conv", "pooling", "transformer")}
_OBJECTS = ("__reduce__", "__reduce_ex__", "__new__")
_NOT_PICKLED = "_compiled_call_impl"  # torch's own __getstate__ leaves it out
_standard: tuple[tuple[str, type | None], ...] = ()


def reducer(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """How the modules of this class are pickled into a skeleton; None: pickle's own way."""
    base = getattr(sys.modules.get("torch.nn"), "Module", None)
    if base is None or not issubclass(kind, base):
        return None
    if getattr(kind, "__getstate__", None) is not base.__getstate__ or not _sets_state_as(kind, base):
        return None
    if any(getattr(kind, name) is not getattr(object, name) for name in _OBJECTS):
        return None
    if copyreg._slotnames(kind):  # type: ignore[attr-defined]
        raise ValueError(f"a {kind.__module__}.{kind.__qualname__}, whose __slots__ the pickle of nn.Module drops")
    if hasattr(kind, "__getnewargs_ex__") or hasattr(kind, "__getnewargs__"):
        return None
    return _reduce


def _sets_state_as(kind: type, base: Any) -> bool:
    function = getattr(kind, "__setstate__", None)
    return function is base.__setstate__ or getattr(function, "__globals__", {}).get("__name__") in _EXTENDING


def _reduce(module: Any) -> tuple[Any, ...]:
    attributes = module.__dict__
    refuse_compiled(module)
    state = None if _NOT_PICKLED in attributes else _core.trimmed_state(attributes, tables())
    if state is None:
        return module.__reduce_ex__(5)  # type: ignore[no-any-return]
    return _core.new_module, (type(module),), state


def refuse_compiled(module: Any) -> None:
    """ValueError for one that `module.compile()` was called on."""
    if module.__dict__.get(_NOT_PICKLED) is not None:
        raise ValueError(f"a {type(module).__qualname__} that was compiled in place, which its pickle drops")


def tables() -> tuple[tuple[str, type | None], ...]:
    """What the constructor of this torch sets: the names, and the types of those that are containers."""
    global _standard
    if not _standard:
        fresh = vars(sys.modules["torch.nn"].Module())
        kinds = (dict, OrderedDict, set)
        _standard = tuple((name, type(value) if type(value) in kinds else None) for name, value in fresh.items())
    return _standard
