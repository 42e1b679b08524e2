# SPDX-License-Identifier: MIT
"""What an import that is made ahead for a kernel gets for its question whether a notebook runs.

In a kernel a shell is there when a cell imports something; in a zygote there is none. Libraries that only ask what it
is get the true answer; whoever wants more of it (events, the kernel) must be imported by the program itself.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_ANSWERED = ("__class__", "__dict__", "__doc__", "__repr__", "__str__", "__module__")


def _make(kind: type, config: Any, asked: list[str]) -> Any:
    """An object that looks like an instance of `kind`; `asked` gets the name of each part of it that is not there."""

    class StandIn:
        __doc__ = kind.__doc__
        __module__ = kind.__module__

        def __getattribute__(self, name: str) -> Any:
            if name == "__class__":
                return kind
            if name == "config":
                return config
            if name not in _ANSWERED:
                asked.append(name)
            return object.__getattribute__(self, name)

        def __setattr__(self, name: str, _value: Any) -> None:
            asked.append(name)

    StandIn.__name__ = StandIn.__qualname__ = kind.__name__
    return StandIn()


@contextlib.contextmanager
def shell(kind: type | None) -> Iterator[list[str]]:
    """Meanwhile get_ipython() finds a shell of that kind (None: nothing is done); what was wanted of it is listed."""
    asked: list[str] = []
    if kind is None:
        yield asked
        return
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    one = _make(kind, Config({"IPKernelApp": {"kernel_class": kind.__module__}}), asked)
    builtins.get_ipython = lambda: one  # type: ignore[attr-defined]
    InteractiveShell._instance = one
    try:
        yield asked
    finally:
        InteractiveShell._instance = None
        del builtins.get_ipython  # type: ignore[attr-defined]


def comm_targets() -> dict[str, Any]:
    """What a frontend can open a comm to, by name: the table itself."""
    comm = sys.modules.get("comm")
    targets: dict[str, Any] = {} if comm is None else comm.get_comm_manager().targets
    return targets


def register_targets(targets: dict[str, Any]) -> None:
    """With the kernel of this process."""
    if targets:
        comm_targets().update(targets)
