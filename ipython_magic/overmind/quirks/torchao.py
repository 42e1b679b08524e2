# SPDX-License-Identifier: MIT
"""torchao gives each layer that it quantised an `extra_repr` of its own: a functools.partial as a bound method.

Pickle asks a bound method for the name of its function, and a partial has none (torchao 0.18, quant_api.py).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


def reducer(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """How the objects of this class are pickled into a skeleton; None: pickle's own way."""
    return _reduce if kind is types.MethodType else None


def restore(function: Any, owner: Any) -> Any:
    """Pickle's call on a hit."""
    return types.MethodType(function, owner)


def _reduce(method: Any) -> tuple[Any, ...]:
    if type(method.__func__) is functools.partial:
        return restore, (method.__func__, method.__self__)
    return method.__reduce__()  # type: ignore[no-any-return]
