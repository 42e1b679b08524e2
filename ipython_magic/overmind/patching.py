# SPDX-License-Identifier: MIT
"""Changes to other people's modules: recorded, undone in reverse; and code that runs when a module is imported.

A wrapper stays reachable after an undo wherever somebody copied it (`from torch import load`, a class decorator).
So every wrapper asks its PatchSet whether it is still active, and is the original function when it is not.
"""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from overmind import log
from overmind.frames import in_no_import_traceback, passed_over
from overmind.loader import Loader

Call = Callable[[Loader, Callable[..., Any], tuple[Any, ...], dict[str, Any], "type | None"], Any]


class MissingTargetError(AttributeError):
    """What was to be patched is not there, or is not a function."""


@dataclass(frozen=True)
class Change:
    """One attribute that was replaced: the raw `__dict__` values, so that a classmethod is kept as one."""

    owner: Any
    name: str
    old: Any
    new: Any


class PatchSet:
    """The changes of one `enable()`. Apply from any thread; `undo()` may be called any number of times.

    `strict`: a missing target raises MissingTargetError (tests). Otherwise it is logged and skipped: a library of
    another version has moved it, and its loads stay native.
    """

    def __init__(self, call: Call, *, strict: bool = False) -> None:
        self._call = call
        self._strict = strict
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self.active = True

    @property
    def changes(self) -> tuple[Change, ...]:
        """What is replaced now, in order."""
        return tuple(self._changes)

    @property
    def loaders(self) -> list[tuple[Loader, Any]]:
        """Each loader that is wrapped now, and the original as a call of the wrapper finds it."""
        found = []
        for change in self._changes:
            loader = getattr(getattr(change.new, "__func__", change.new), "__overmind_loader__", None)
            if loader is not None:
                in_class = isinstance(change.owner, type)
                found.append((loader, change.old.__get__(None, change.owner) if in_class else change.old))
        return found

    def wrap(self, module: ModuleType, path: str, loader: Loader) -> None:
        """Puts a wrapper for `loader` at `module.path` ("load" or "Class.from_pretrained")."""
        try:
            owner, name, old = _find(module, path)
            new = self._wrapper(old, loader)
        except MissingTargetError as missing:
            if self._strict:
                raise
            log.logger.info("%s; its loads stay native", missing)
            return
        self._replace(owner, name, old, new)

    def share(self, module: ModuleType, name: str, old: Any, new: Any) -> None:
        """A second reference to a function that was wrapped: `torch.load` beside `torch.serialization.load`, or
        `transformers.pipeline` in the lazy package. Skipped if it is not there, or something else."""
        if vars(module).get(name) is old and new is not old:
            self._replace(module, name, old, new)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Puts `make(what is there)` at `owner.name`: for what is no loader, but has a part in a load."""
        old = vars(owner).get(name)
        if callable(old):
            self._replace(owner, name, old, make(old))
        elif self._strict:
            raise MissingTargetError(f"{owner.__name__}.{name} does not exist")

    def call(self, loader: Loader, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A load of Overmind's own making: `function(*args)`, from the cache where that is the same."""
        return self._call(loader, function, args, {}, None)

    def _replace(self, owner: Any, name: str, old: Any, new: Any) -> None:
        with self._lock:
            if not self.active:
                return  # an import that began before the undo
            setattr(owner, name, new)
            self._changes.append(Change(owner, name, old, new))

    def undo(self) -> None:
        """Restores everything that is still ours. What somebody patched over us afterwards stays theirs; our
        wrapper below it is inert from now on."""
        with self._lock:
            self.active = False
            changes, self._changes = self._changes, []
        for change in reversed(changes):
            now = vars(change.owner).get(change.name)
            if now is change.new:
                setattr(change.owner, change.name, change.old)
            elif now is not None:
                log.logger.info("%s.%s was replaced by somebody else; left as it is", change.owner, change.name)
        _restore_copies(changes)

    def _wrapper(self, old: Any, loader: Loader) -> Any:
        if isinstance(old, classmethod):
            return classmethod(self._class_wrapper(old.__func__, loader))
        if isinstance(old, staticmethod):
            return staticmethod(self._plain_wrapper(old.__func__, loader))
        if callable(old) and not isinstance(old, type):
            return self._plain_wrapper(old, loader)
        raise MissingTargetError(f"{loader.name} is {type(old).__name__}, no function")

    def _plain_wrapper(self, original: Callable[..., Any], loader: Loader) -> Callable[..., Any]:
        @functools.wraps(original)
        @passed_over
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            return self._call(loader, original, args, kwargs, None)

        vars(wrapper)["__overmind_loader__"] = loader
        return wrapper

    def _class_wrapper(self, original: Callable[..., Any], loader: Loader) -> Callable[..., Any]:
        @functools.wraps(original)
        @passed_over
        def wrapper(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(cls)
            if not self.active:
                return bound(*args, **kwargs)
            return self._call(loader, bound, args, kwargs, cls)

        vars(wrapper)["__overmind_loader__"] = loader
        return wrapper


def _restore_copies(changes: list[Change]) -> None:
    """Puts the original back where a module holds a copy of a wrapper under any name: `from torch import load` in a
    notebook, `pipeline` in a lazy package. One pass over the collector's objects, 0.1 s with torch loaded."""
    originals = {id(change.new): change.old for change in changes if isinstance(change.new, FunctionType)}
    wrappers = [change.new for change in changes if id(change.new) in originals]
    if not wrappers:
        return
    for holder in gc.get_referrers(*wrappers):
        if type(holder) is dict and isinstance(holder.get("__name__"), str) and "__spec__" in holder:
            for name, value in list(holder.items()):
                if id(value) in originals:
                    holder[name] = originals[id(value)]


def _find(module: ModuleType, path: str) -> tuple[Any, str, Any]:
    """The object that really owns the last name of `path`, that name, and its raw value."""
    *parents, name = path.split(".")
    owner: Any = module
    for parent in parents:
        owner = vars(owner).get(parent)
        if not isinstance(owner, type):
            raise MissingTargetError(f"{module.__name__} has no class {parent}")
    if name not in vars(owner):
        raise MissingTargetError(f"{module.__name__}.{path} does not exist")
    return owner, name, vars(owner)[name]


Hook = Callable[[ModuleType], None]


class ImportHooks:
    """Runs a function once for each module named, as soon as that module is there: now, or when it is imported.

    A module is only watched by name; nothing is imported. While modules are awaited a finder stands first in
    `sys.meta_path`; an unrelated import costs it one dictionary lookup. The finder asks the finders behind it, and
    the loader they give is used as it is, with `exec_module` shadowed on the instance until it has run: `__spec__` and
    `__loader__` stay what they are without Overmind. Thread-safe. A hook that raises is logged, the import goes on.
    """

    def __init__(self) -> None:
        self._awaited: dict[str, tuple[Hook, ...]] = {}
        self._asking = threading.local()

    @property
    def awaited(self) -> frozenset[str]:
        """Names of the modules that were not imported yet."""
        return frozenset(self._awaited)

    def add(self, name: str, hook: Hook) -> None:
        """Runs `hook(module)` once `name` is imported, after those that were added for it before."""
        self._awaited[name] = (*self._awaited.get(name, ()), hook)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._fire_if_there(name)

    def catch_up(self) -> None:
        """Runs the hooks of modules that came in past the finder (another one stood before it)."""
        for name in list(self._awaited):
            self._fire_if_there(name)

    def remove(self) -> None:
        """Forgets what is awaited and takes the finder out. Idempotent."""
        self._awaited.clear()
        self._leave()

    def _leave(self) -> None:
        # A new list, not an edited one: another thread may be walking through the old one inside an import, and
        # would skip a finder.
        if self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def _fire_if_there(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is None:
            return
        if type(module) is not ModuleType and "__getattribute__" in vars(type(module)):
            return  # made by importlib.util.LazyLoader and not executed yet; looking at it would execute it
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            return
        self._fire(name, module)

    def _fire(self, name: str, module: ModuleType) -> None:
        for hook in self._awaited.pop(name, ()):
            try:
                hook(module)
            except Exception:
                log.logger.warning("could not prepare %s, its loads stay native", name, exc_info=True)
        if not self._awaited:
            self._leave()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import system (importlib.abc.MetaPathFinder)."""
        if fullname not in self._awaited or getattr(self._asking, "name", None) == fullname:
            return None
        outer = getattr(self._asking, "name", None)
        self._asking.name = fullname
        try:
            spec = self._ask_others(fullname, path, target)
        finally:
            self._asking.name = outer
        if spec is not None and spec.loader is not None:
            self._shadow(spec.loader, fullname)
        return spec

    def _ask_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None

    def _shadow(self, loader: Any, fullname: str) -> None:
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        @in_no_import_traceback
        def exec_module(module: ModuleType) -> None:
            if module.__name__ == fullname:
                vars(loader).pop("exec_module", None)
            original(module)
            if module.__name__ == fullname:
                self._fire(fullname, sys.modules.get(fullname, module))

        try:
            vars(loader)["exec_module"] = exec_module
        except TypeError:
            log.logger.info("%s has a loader that can't be watched; its loads stay native", fullname)
