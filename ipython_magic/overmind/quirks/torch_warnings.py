# SPDX-License-Identifier: MIT
"""What torch says once in a process, when it makes the first sparse or quantised tensor.

The load says it, and so does a restore, which makes such a tensor by the same functions of torch. Saying again what the
load said would be twice, and once more at every later hit, where torch itself is silent. So what torch says while it
restores is held back, and tells which of the kept messages are still to be said in this process.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import types
import warnings
from collections.abc import Sequence
from typing import Any

from overmind import replay as messages_of_loads
from overmind.warning_hook import WarningHook

_REBUILDERS = {"_rebuild_sparse_tensor", "_rebuild_qtensor"}  # functions of torch._utils, in a pickle
_TYPED = "TypedStorage is deprecated"  # said by unpickling alone, whereas torch.quantize_per_tensor() does not say it
_ONCE = re.compile(rf"{_TYPED}|Sparse \w+ tensor support is in beta state|torch\.quantize_per_tensor, ")

_local = threading.local()
_lock = threading.Lock()
_hook: _Hook | None = None
_holding = 0


def concerns(names: Sequence[Sequence[str]]) -> bool:
    """Whether a pickle that names these (module, name) makes such tensors."""
    return any(module == "torch._utils" and name in _REBUILDERS for module, name in names)


class Held:
    """Context manager round one restore: holds back what torch says once, on this thread. Nothing else is touched."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Any, ...]] = {}

    def __enter__(self) -> Held:
        global _hook, _holding
        with _lock:
            _holding += 1
            if _hook is None:
                _hook = _Hook()
        _local.held = self
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: types.TracebackType | None
    ) -> None:
        global _hook, _holding
        _local.held = None
        with _lock:
            _holding -= 1
            if _holding == 0 and _hook is not None:
                _hook.remove()
                _hook = None

    def note(self, text: str, warning: tuple[Any, ...]) -> bool:
        """True if this is held back; `warning` is what warnings.showwarning() takes."""
        if _ONCE.match(text) is None:
            return False
        self._said.setdefault(text, warning)
        return True

    def replay(self, messages: Sequence[Sequence[Any]], generic: bool) -> None:
        """What the load said, without what torch has said before in this process. Then what it says here first, though
        it had said so before the load that was kept; `generic`: that load need not have unpickled anything."""
        for message in messages:
            text = message[3]
            if message[0] != "w" or _ONCE.match(text) is None:
                messages_of_loads.replay([message])
            elif text in self._said:
                warning = self._said.pop(text)
                if warning[2:4] == tuple(message[4:6]):
                    warnings.showwarning(*warning)  # its module's filters know it, and would take it for a second one
                else:
                    messages_of_loads.replay([message])
        for text, warning in self._said.items():
            if generic and text.startswith(_TYPED):
                sys.modules["torch.storage"]._reset_warn_typed_storage_removal()
            else:
                warnings.showwarning(*warning)


class _Hook(WarningHook):
    """While something is restored."""

    def takes(self, warning: tuple[Any, ...]) -> bool:
        held: Held | None = getattr(_local, "held", None)
        return held is not None and held.note(str(warning[0]), warning)


def _in_child() -> None:
    global _lock, _hook, _holding
    _lock = threading.Lock()
    if _hook is not None and getattr(_local, "held", None) is None:
        _hook.remove()  # the restores of other threads do not go on here
        _hook, _holding = None, 0


os.register_at_fork(after_in_child=_in_child)
