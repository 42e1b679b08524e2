# SPDX-License-Identifier: MIT
"""Overmind on and off in this process: patches, import hooks, magics. The only module with that state.

It survives `%reload_ext`, which executes overmind/__init__.py again but not this file.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from overmind import loaders, log, signals
from overmind.frames import passed_over
from overmind.loader import Loader
from overmind.patching import ImportHooks, PatchSet

_lock = threading.RLock()
_patches: PatchSet | None = None
_hooks: ImportHooks | None = None
# When these are imported, a load may follow.
_WARMS = ("torch", "transformers", "transformers.modeling_utils", "diffusers", "diffusers.models.modeling_utils")
_said_disabled = False


def broken() -> str | None:
    """Why nothing of Overmind works in this process, with what to do; None if it does."""
    log.configure("warning")  # what follows may be the only thing to say
    try:
        from overmind import _core  # noqa: F401
    except ImportError as error:
        return f"its compiled part can't be imported ({error}); reinstall overmind-jupyter for this Python"
    return None


def wrong_settings() -> str | None:
    """Which environment variable has a value that can't be understood: every load is native then, and its record says
    so. None if all can. REQUIRES: not broken()."""
    from overmind import _core

    try:
        settings = _core.config()
    except _core.OvermindError as error:
        return str(error)
    log.configure(settings.log_level)
    return None


def disabled_by_environment() -> bool:
    """OVERMIND_DISABLE=1. REQUIRES: no wrong_settings()."""
    from overmind import _core

    return _core.config().disabled


def enabled() -> bool:
    """Whether loaders are wrapped now."""
    return _patches is not None


def enable() -> bool:
    """Wraps the loaders. Idempotent; False where it can't work, with a log line: now, or from the first load on where
    a variable is wrong, for then each load is wrapped as well and leaves a record with the reason."""
    reason = broken()
    if reason is not None:
        log.warn_once(f"loads are native: {reason}")
        return False
    works = wrong_settings() is None
    if works and disabled_by_environment():
        _say_disabled()
        return False
    _install()
    return works


def _say_disabled() -> None:
    global _said_disabled
    if not _said_disabled:
        _said_disabled = True
        log.logger.info("OVERMIND_DISABLE is set, loads are native")


def _install() -> None:
    global _patches, _hooks
    with _lock:
        if _hooks is not None:
            _hooks.catch_up()
            return
        _patches, _hooks = PatchSet(_call), ImportHooks()
        loaders.install(_patches, _hooks)
        for library in _WARMS:
            _hooks.add(library, _warm)


def disable() -> None:
    """Restores every loader, and stops watching imports. Idempotent."""
    global _patches, _hooks
    with _lock:
        patches, hooks = _patches, _hooks
        _patches = _hooks = None
        if hooks is not None:
            hooks.remove()
        if patches is not None:
            patches.undo()
    if patches is not None:
        from overmind import _core

        _core.stop_watching()


def _load_module() -> Any:
    """overmind.load, imported at the first load; None if that fails (a broken installation)."""
    try:
        return importlib.import_module("overmind.load")
    except Exception as error:
        signals.pass_on(error)
        log.warn_once(f"loads are native: overmind.load can't be imported ({type(error).__name__}: {error})")
        return None


def _warm(_library: ModuleType) -> None:
    """Does what every first load needs while a library is imported anyway: 30 ms that no hit waits for."""
    module, patches = _load_module(), _patches
    if module is not None:
        module.warm(patches.loaders if patches is not None else ())


@passed_over
def _call(
    loader: Loader, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: type | None
) -> Any:
    module = _load_module()
    if module is None:
        return function(*args, **kwargs)
    return module.call(loader, function, args, kwargs, owner)


@passed_over
def generic(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`overmind.load(fn, *args, **kwargs)`."""
    module = None
    if broken() is None:
        if wrong_settings() is None and disabled_by_environment():
            _say_disabled()
        else:
            module = _load_module()
    if module is None:
        return fn(*args, **kwargs)
    return module.generic(fn, *args, **kwargs)


def load_ipython_extension(ip: Any) -> None:
    """%load_ext overmind. Never raises for what it can say: a notebook's first cell must not fail on it."""
    reason = broken()
    if reason is not None:
        print(f"overmind: not loaded: {reason}")
        return
    from overmind.magic import OvermindMagics

    OvermindMagics.install(ip)
    reason = wrong_settings()
    if reason is not None:
        print(f"overmind: loads are native: {reason}")
    elif disabled_by_environment():
        print("overmind: OVERMIND_DISABLE is set: %overmind works, loads are native")
    enable()


def unload_ipython_extension(ip: Any) -> None:
    """%unload_ext overmind. Harmless if it was never loaded."""
    disable()
    from overmind.magic import OvermindMagics

    OvermindMagics.uninstall(ip)
