# SPDX-License-Identifier: MIT
"""torch wraps the hooks of load_state_dict and gives the wrapper the name and the docstring of the function in it.

Its own pickle forgets those (torch 2.13, _WrappedHook.__getstate__), so a hit makes the wrapper anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def reducer(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """How the objects of this class are pickled into a skeleton; None: pickle's own way."""
    return _reduce if (kind.__module__, kind.__qualname__) == ("torch.nn.modules.module", "_WrappedHook") else None


def _reduce(wrapper: Any) -> tuple[Any, ...]:
    return type(wrapper), (wrapper.hook,), wrapper.__getstate__()
