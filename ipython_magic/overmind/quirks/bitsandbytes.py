# SPDX-License-Identifier: MIT
"""bitsandbytes: Params4bit and Int8Params are Parameters that pickle gives back as plain ones.

Both are a plain tensor with a class of their own and attributes (`quant_state`; `CB`, `SCB`), some of which share its
memory. So a skeleton holds the tensor, which is built as any other, and puts class and attributes on it as they were:
the library's own `__setstate__` would assign `data` once more and know only the attributes of its version.

A nested quant state does not own its second code book: that is one tensor for the whole process
(`functional.name2qmap`), so a hit takes this process's (bitsandbytes 0.50, quantize_blockwise).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MODULES = "bitsandbytes.nn.modules"
_FUNCTIONAL = "bitsandbytes.functional"
_BOOK = "dynamic"  # its name in name2qmap

Reducer = Callable[[Any], tuple[Any, ...]]


def reducer(kind: type) -> Reducer | None:
    """How the objects of this class are pickled into a skeleton; None: pickle's own way."""
    return _REDUCERS.get((kind.__module__, kind.__qualname__))


def restore_parameter(kind: Any, data: Any, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    """Pickle's call on a hit. Among the attributes may be the module that the parameter belongs to, still empty."""
    import torch

    parameter = torch.Tensor._make_subclass(kind, data, requires_grad)
    parameter.__dict__.update(attributes)
    return parameter


def restore_code_book(kind: Any) -> Any:
    """Pickle's call on a hit: a quant state around this process's dynamic code book, without its other attributes."""
    functional: Any = sys.modules[_FUNCTIONAL]
    if _BOOK not in functional.name2qmap:
        functional.name2qmap[_BOOK] = functional.create_dynamic_map()
    state = kind.__new__(kind)
    state.__dict__["code"] = functional.name2qmap[_BOOK]
    return state


def _reduce_parameter(parameter: Any) -> tuple[Any, ...]:
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        data = parameter.detach().as_subclass(torch.Tensor)
    return restore_parameter, (type(parameter), data, parameter.requires_grad, dict(parameter.__dict__))


def _reduce_quant_state(state: Any) -> tuple[Any, ...]:
    functional: Any = sys.modules[_FUNCTIONAL]
    own = dict(state.__dict__)
    if own.get("code") is None or own["code"] is not functional.name2qmap.get(_BOOK):
        return state.__reduce_ex__(5)  # type: ignore[no-any-return]
    del own["code"]
    return restore_code_book, (type(state),), own


_REDUCERS: dict[tuple[str, str], Reducer] = {
    (_MODULES, "Params4bit"): _reduce_parameter,
    (_MODULES, "Int8Params"): _reduce_parameter,
    (_FUNCTIONAL, "QuantState"): _reduce_quant_state,
}
