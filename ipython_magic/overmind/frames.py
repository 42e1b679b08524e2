# SPDX-License-Identifier: MIT
"""Overmind's own frames between the user and a loader: counted by nobody.

`warnings.warn(stacklevel=2)` in a loader names its caller, and Python shows a DeprecationWarning only if that is the
notebook itself; `logging` finds callers in the same way. Both pass over the frames of the import system, which they
know by their file names, so that is what the frames around a native call are named like.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, TypeVar

_MARK = " (passed over like importlib._bootstrap)"

F = TypeVar("F")


def passed_over(function: F) -> F:
    """Decorator, on the plain function. Tracebacks still name the file and the line."""
    plain: Any = function
    plain.__code__ = plain.__code__.replace(co_filename=plain.__code__.co_filename + _MARK)
    return function


def in_no_import_traceback(function: F) -> F:
    """Decorator, on a plain function that the import system calls, and that goes on into the import system. An import
    that fails has a traceback without the import system's frames, which the interpreter knows by their file name."""
    plain: Any = function
    plain.__code__ = plain.__code__.replace(co_filename="<frozen importlib._bootstrap_external>")
    return function


def caller() -> FrameType | None:
    """The frame that called Overmind, the outermost if a load is inside another; None outside of a load."""
    frame: FrameType | None = sys._getframe(1)
    outer, inside = None, False
    while frame is not None:
        ours = frame.f_code.co_filename.endswith(_MARK)
        if inside and not ours:
            outer = frame
        inside = ours
        frame = frame.f_back
    return outer


def importing(frame: FrameType | None = None) -> bool:
    """True while a module is executed that was imported inside the load: what it says, it says on a hit as well, when
    its own import comes. `frame`: the innermost one to look at, else the caller's."""
    frame = frame or sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_MARK):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
