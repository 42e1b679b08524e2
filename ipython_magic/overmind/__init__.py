# SPDX-License-Identifier: MIT
"""Overmind: models that survive a kernel restart.

    %load_ext overmind          in a notebook, or
    overmind.enable()           in a script

and loads of transformers, diffusers, torch and safetensors come back from memory the next time, exactly as the
native load gives them. Importing this package imports none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overmind.frames import passed_over as _passed_over

if TYPE_CHECKING:
    from overmind.records import LoadRecord

__all__ = [
    "LoadRecord",
    "__version__",
    "disable",
    "enable",
    "history",
    "load",
    "load_ipython_extension",
    "stats",
    "unload_ipython_extension",
    "wait_published",
]


def enable() -> bool:
    """Puts the cache before every known loader, of libraries that are imported already and of those to come.

    Idempotent. False where it can't work (OVERMIND_DISABLE=1, a broken installation, a variable with a wrong value);
    the reason is logged.
    """
    from overmind import extension

    return extension.enable()


def disable() -> None:
    """Restores every loader. Idempotent. What was loaded stays valid."""
    from overmind import extension

    extension.disable()


@_passed_over
def load(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `fn(*args, **kwargs)` returns, from the cache where that is provably the same. Works without `enable()`."""
    from overmind import extension

    return extension.generic(fn, args, kwargs)


def history() -> list[LoadRecord]:
    """The loads of this process, oldest first."""
    from overmind import records

    return records.history()


def stats() -> dict[str, Any]:
    """Figures of this process ("process") and of the daemon ("store"; None while none can be reached)."""
    from overmind import store

    return store.stats()


def wait_published(timeout: float | None = None) -> bool:
    """Waits until all that this process loaded is in the store; `timeout` in seconds. False: not all of it is."""
    from overmind import store

    return store.wait_published(timeout)


def load_ipython_extension(ip: Any) -> None:
    """%load_ext overmind"""
    from overmind import extension

    extension.load_ipython_extension(ip)


def unload_ipython_extension(ip: Any) -> None:
    """%unload_ext overmind"""
    from overmind import extension

    extension.unload_ipython_extension(ip)


def __getattr__(name: str) -> Any:
    if name == "LoadRecord":
        from overmind.records import LoadRecord

        return LoadRecord
    if name == "__version__":
        from overmind import _core

        return _core.__version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """`overmind.load` is a function of the public API and a module of the package: importing the module must not
    put it in the function's place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "load" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
