# SPDX-License-Identifier: MIT
"""Exceptions that a signal handler of the user's raised while Overmind's own code ran: they are not ours to keep.

A handler runs between any two steps of the main thread; natively what it raises comes out of the load.
"""

from __future__ import annotations

import signal
import types
from typing import Any


def pass_on(error: BaseException) -> None:
    """Raises what a signal handler raised, if `error` is that, or came of it. Else does nothing."""
    codes = _handlers()
    seen: set[int] = set()
    current: BaseException | None = error
    while codes and current is not None and id(current) not in seen:
        seen.add(id(current))
        if _passed_through(current.__traceback__, codes):
            raise current
        current = current.__cause__ or current.__context__


def _handlers() -> set[types.CodeType]:
    """The code of the handlers that are set, as far as it is Python's."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if not callable(handler):
            continue
        while hasattr(handler, "func"):  # functools.partial
            handler = handler.func
        for candidate in (handler, type(handler).__call__):
            code = getattr(getattr(candidate, "__func__", candidate), "__code__", None)
            if isinstance(code, types.CodeType):
                found.add(code)
    return found


def _passed_through(trace: types.TracebackType | None, codes: set[types.CodeType]) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
