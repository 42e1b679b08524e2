# SPDX-License-Identifier: MIT
"""Which native loads ran at the same time as another one, in other threads of this process.

transformers and diffusers set torch's default dtype and replace its initialisers, for the whole process, while they
load a model: a load in another thread meanwhile computes with what they set. Its result is the caller's, and is not
kept. Loads that were served from the store run no library's code and count for nothing.
"""

from __future__ import annotations

import os
import threading
import types

from overmind.loader import Loader

_lock = threading.Lock()
_running: list[NativeCall] = []


class NativeCall:
    """Context manager round one native call. Thread-safe; `reason` is why its result can't be kept, or None."""

    def __init__(self, loader: Loader) -> None:
        self.reason: str | None = None
        self._loader = loader
        self._thread = threading.get_ident()

    def __enter__(self) -> NativeCall:
        with _lock:
            for other in _running:
                if other._thread != self._thread:
                    self._met(other)
                    other._met(self)
            _running.append(self)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: types.TracebackType | None
    ) -> None:
        with _lock:
            _running[:] = [call for call in _running if call is not self]

    def _met(self, other: NativeCall) -> None:
        if other._loader.changes_process:
            name = other._loader.name
            self.reason = f"{name} ran in another thread meanwhile, and may have set torch's default dtype for both"


def elsewhere() -> bool:
    """Whether another thread runs a native load that may have changed settings of the process. Thread-safe."""
    with _lock:
        return any(call._thread != threading.get_ident() and call._loader.changes_process for call in _running)


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _running.clear()  # those of other threads do not go on here


os.register_at_fork(after_in_child=_in_child)
