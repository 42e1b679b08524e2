# SPDX-License-Identifier: MIT
"""Warnings and log records of a native load, said again on a hit.

They go through this process's own filters, levels and handlers, as if they came from the load just now.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Sequence
from typing import Any

from overmind import frames

_ONCE = frozenset({"info_once", "warning_once"})  # methods that transformers adds to logging.Logger


def of_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> list[Any]:
    """A warning as JSON. One that names the caller of the load (stacklevel=2) has no place: a hit has its own."""
    user = frames.caller()
    if user is not None and (user.f_code.co_filename, user.f_lineno) == (filename, lineno):
        filename, lineno = "", 0
    return ["w", category.__module__, category.__qualname__, str(message), filename, lineno]


def of_record(record: logging.LogRecord) -> list[Any]:
    """A log record as JSON; its message is formatted. The function's name tells what was said once per process."""
    text = record.getMessage()
    trace = record.exc_text
    if trace is None and record.exc_info and record.exc_info[0] is not None:
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    return ["l", record.name, record.levelno, text, record.pathname, record.lineno, record.funcName, trace]


def replay(messages: Sequence[Sequence[Any]]) -> None:
    """Says each message again, in order. A warning that this process's filters turn into an error is raised."""
    for message in messages:
        if message[0] == "w":
            _warn(*message[1:])
        else:
            _log(*message[1:])


def _warn(module: str, qualname: str, text: str, filename: str, lineno: int) -> None:
    kind = _category(module, qualname)
    user = None if filename else frames.caller()
    if user is not None:
        registry = user.f_globals.setdefault("__warningregistry__", {})
        name = user.f_globals.get("__name__") or "<string>"
        warnings.warn_explicit(text, kind, user.f_code.co_filename, user.f_lineno, module=name, registry=registry)
        return
    owner = _module_of(filename)
    if owner is None:
        warnings.warn_explicit(text, kind, filename, lineno)
        return
    # The registry of "once" and "default" filters is the warning module's own, as warnings.warn() would use it.
    registry = vars(sys.modules[owner]).setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, kind, filename, lineno, module=owner, registry=registry)


def _module_of(filename: str) -> str | None:
    """First by the name that the file suggests: looking through 4,000 modules takes 4 ms for each warning."""
    path, _, kind = filename.rpartition(".")
    parts = path.removesuffix("/__init__").split("/") if kind == "py" else []
    for begin in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[begin:])
        if _is_of(sys.modules.get(name), filename):
            return name
    return next((name for name, module in list(sys.modules.items()) if _is_of(module, filename)), None)


def _is_of(module: object, filename: str) -> bool:
    return isinstance(module, types.ModuleType) and vars(module).get("__file__") == filename


def _category(module: str, qualname: str) -> type[Warning]:
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return UserWarning
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning


def _log(name: str, level: int, text: str, pathname: str, lineno: int, function: str | None, trace: str | None) -> None:
    logger = logging.getLogger(name)
    if not logger.isEnabledFor(level):
        return
    once = getattr(logger, function, None) if function in _ONCE else None
    if callable(once):
        once(text)  # it remembers what it has said
        return
    record = logger.makeRecord(name, level, pathname, lineno, text, (), None, function)
    record.exc_text = trace
    logger.handle(record)
