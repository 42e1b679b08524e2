# SPDX-License-Identifier: MIT
"""Python's garbage collector during a load.

A load makes 100,000 objects and more, almost all of which stay. The collector goes through the young ones again and
again, and then through every object of the process: in the first load of a diffusers pipeline that one full collection
takes 110 to 300 ms of 0.8 s, plainly loaded or not, and finds nothing. Sparing it pays for what recording a load costs.

Both ways end with freeze() and unfreeze(), which put all objects into the oldest generation without looking at them
(CPython 3.10-3.13), so that the collections that were spared are not made up for right after the load.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

# So many collections of the youngest generation before the next older one: never.
_NEVER = 1 << 30


@contextmanager
def off() -> Iterator[None]:
    """No collection at all: for the milliseconds of a restore or of a take."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _age()
        gc.enable()


class _YoungOnly:
    """Context manager: only the youngest generation is collected, in the whole process, which frees what a load leaves
    behind in cycles as it goes on. For native loads, which may take minutes. Several at a time, on any threads; the
    last one out sets the thresholds that the first one found, unless somebody has set others meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._found: tuple[int, int, int] | None = None
        os.register_at_fork(after_in_child=self._in_child)

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1 and gc.isenabled() and not _some_are_frozen():
                self._found = gc.get_threshold()
                gc.set_threshold(self._found[0], _NEVER, self._found[2])

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: types.TracebackType | None
    ) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)
            if self._inside == 0:
                self._put_back()

    def _put_back(self) -> None:
        found, self._found = self._found, None
        if found is not None and gc.get_threshold() == (found[0], _NEVER, found[2]):
            _age()
            gc.set_threshold(*found)

    def _in_child(self) -> None:
        """The loads of other threads do not go on in a fork; one of its own may, without this."""
        self._lock = threading.Lock()
        self._inside = 0
        self._put_back()


def _age() -> None:
    """Puts all objects into the oldest generation: collecting the youngest would look at each of them once, 10 ms."""
    if not _some_are_frozen():
        gc.freeze()
        gc.unfreeze()


def _some_are_frozen() -> bool:
    """Whether gc.unfreeze() would undo what somebody did. A zygote froze all its objects: counting them takes 57 ms."""
    profile = sys.modules.get("overmind.zygote.profile")
    return (profile is not None and profile.forked()) or gc.get_freeze_count() > 0


young_only = _YoungOnly()
