# SPDX-License-Identifier: MIT
"""Modules that were imported ahead, out of sight until the program imports them.

A fork begins with the sys.modules of a fresh interpreter. The first import of a module from the stash brings back
what came with it in the zygote, in the same order, and does again what those imports did to the process. So
`"torch" in sys.modules`, environment and warnings are what they are without a zygote, at every moment.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from overmind import _core, log, replay, store
from overmind.zygote import generator, standin
from overmind.zygote.preload import Group

Conflict = Callable[[str, str], None]


class Stash:
    """A finder for sys.meta_path. Thread-safe: the import system calls it under its own locks and ours.

    REQUIRES: `groups` in the order in which they were imported, and none of their modules used by the program yet.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)
        self._where = {name: at for at, group in enumerate(self._groups) for name in group.modules}
        # By top-level name: the last group that has something of it.
        self._last_with = {name: at for at, group in enumerate(self._groups) for name in group.packages}
        self._next = 0  # the first group that is still out of sight
        self._lock = threading.RLock()
        self._path = frozenset(sys.path)
        self._listings: dict[str, frozenset[str]] = {}
        self._expected: dict[str, str | None] = {}  # the environment as the program would have it without a change
        self._random: Any = None  # state of the program's `random` at its start
        self.on_conflict: Conflict | None = None
        self.on_reveal: Callable[[Sequence[str]], None] | None = None  # names, in the order in which imports began

    def hide(self) -> None:
        """Takes everything out of sight. Called once, in a fork."""
        random = sys.modules.get("random") or self._module("random")
        for name, at in self._where.items():
            module = sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            if parent and self._where.get(parent, -1) != at and module is not None:
                owner = sys.modules.get(parent) or self._module(parent)
                if owner is not None and vars(owner).get(child) is module:
                    delattr(owner, child)
        # Filters and environment come back with the groups that added them, newest first out.
        for group in reversed(self._groups):
            for key in group.environment:
                os.environ.pop(key, None)
        added = {id(each) for group in self._groups for each in (*group.filters_front, *group.filters_back)}
        if added:
            warnings.filters[:] = [each for each in warnings.filters if id(each) not in added]  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        self._expected = dict(os.environ)
        self._random = generator.state(random)
        sys.meta_path.insert(0, self)

    def outlive(self) -> None:
        """Called when the program and all that atexit calls are done: spares libraries the interpreter's last round,
        in which every module is taken apart. That would copy each page that is shared with the zygote: 0.4 s for
        torch, transformers and diffusers, of which only the program's own objects can be worth it."""
        for group in self._groups:
            _core.keep_forever(group.modules)
            for name, module in group.modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]

    def _module(self, name: str) -> ModuleType | None:
        at = self._where.get(name)
        return None if at is None else self._groups[at].modules.get(name)

    def knows(self, name: str) -> bool:
        """Whether a module of that name was imported ahead."""
        return name in self._where

    def has(self, name: str, module: object) -> bool:
        """Whether it is one that was imported ahead."""
        return module is not None and self._module(name) is module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import system (importlib.abc.MetaPathFinder)."""
        at = self._where.get(fullname)
        if at is None or fullname in sys.modules or at < self._next:
            return None  # not ours; or the program took it out of sys.modules, and wants a new one
        module = self._groups[at].modules[fullname]
        original = vars(module).get("__spec__")
        spec = importlib.machinery.ModuleSpec(fullname, cast(Any, _Handing(self, module, original)))
        for name in ("origin", "submodule_search_locations", "cached", "has_location"):
            with contextlib.suppress(AttributeError):
                setattr(spec, name, getattr(original, name))
        return spec

    def reveal(self, fullname: str) -> None:
        """Brings back everything up to the import that `fullname` came with."""
        with self._lock:
            while self._next <= self._where[fullname]:
                group = self._groups[self._next]
                self._next += 1
                self._reveal(group, fullname)
            if self._next == len(self._groups):
                sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def apply_environment(self) -> None:
        """Does again what the imports in sight did to the environment, after it was replaced."""
        for group in self._groups[: self._next]:
            _set_variables(group)
        self._expected = dict(os.environ)

    def _reveal(self, group: Group, asked: str) -> None:
        why = self._conflict(group)
        if why is not None:
            log.logger.warning(
                "%s. It was imported ahead, so the change has no effect on it; the next start will do without. "
                "OVERMIND_ZYGOTE=0 switches this off.",
                why,
            )
            if self.on_conflict is not None:
                self.on_conflict(group.name, why)
        if self.on_reveal is not None:
            self.on_reveal([group.name, *group.modules])
        for name, module in group.modules.items():
            if name == asked or name in sys.modules:
                continue
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent and (owner := sys.modules.get(parent) or self._module(parent)) is not None:
                vars(owner).setdefault(child, module)
        _do_again(group)
        self._expected.update({key: os.environ.get(key) for key in group.environment})
        for name, renew in RENEWED.items():
            if name in group.modules:
                renew(group.modules[name])

    def _conflict(self, group: Group) -> str | None:
        """What the program changed that the import would have seen."""
        now = dict(os.environ)
        changed = [name for name in now.keys() | self._expected.keys() if now.get(name) != self._expected.get(name)]
        for name in changed:
            if group.concerns(name):
                return f"{name} was changed before {group.name} was imported"
        if group.draws and self._is_seeded():
            return f"random numbers were seeded before {group.name} was imported, which draws some"
        folders = self._new_folders()
        for folder in folders:
            for name in self._listing(folder):
                if self._last_with.get(name, -1) >= self._next - 1:
                    return f"{name} of {folder} would have been imported with {group.name}"
        return None

    def _is_seeded(self) -> bool:
        now = generator.state()
        return now is not None and self._random is not None and not generator.only_drawn(self._random, now)

    def _new_folders(self) -> list[str]:
        new = [folder or working_folder() for folder in sys.path if folder not in self._path]
        return [folder for folder in new if folder is not None]

    def _listing(self, folder: str) -> frozenset[str]:
        found = self._listings.get(folder)
        if found is None:
            found = self._listings[folder] = names_in(folder)
        return found


def packages_of(groups: Sequence[Group]) -> frozenset[str]:
    """Top-level names of all that came with these imports."""
    return frozenset().union(*(group.packages for group in groups))


def names_in(folder: str) -> frozenset[str]:
    """Names that an import would find in `folder`. An empty folder is a (namespace) package only for want of others."""
    suffixes = tuple(importlib.machinery.all_suffixes())
    found = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(suffixes):
                    found.add(entry.name.partition(".")[0])
                elif "." not in entry.name and any(
                    os.path.exists(os.path.join(entry.path, f"__init__{suffix}")) for suffix in suffixes
                ):
                    found.add(entry.name)
    except OSError:
        pass
    return frozenset(found)


def _set_variables(group: Group) -> None:
    for key, value in group.environment.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def _do_again(group: Group) -> None:
    _set_variables(group)
    if group.filters_front or group.filters_back:
        warnings.filters[:] = [*group.filters_front, *warnings.filters, *group.filters_back]  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
    if group.messages:
        replay.replay(group.messages)
    for function, args, options in group.at_exit:
        atexit.register(function, *args, **options)
    standin.register_targets(group.targets)


class _Handing:
    """A loader that hands out a module that is there, and leaves it as it is."""

    def __init__(self, stash: Stash, module: ModuleType, spec: Any) -> None:
        self._stash = stash
        self._module = module
        self._spec = spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module; from now on the program has imported it."""
        self._stash.reveal(spec.name)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It was executed in the zygote."""
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_spec"].loader, name)


def working_folder() -> str | None:
    """None if it was deleted: the interpreter and multiprocessing start all the same."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _renew_multiprocessing(_module: Any) -> None:
    """Workers that are no forks take the classes of the program from a second name of its main module."""
    sys.modules["__mp_main__"] = sys.modules["__main__"]


def _renew_processes(module: Any) -> None:
    """multiprocessing.process: made at import, and to be this process's own."""
    module.ORIGINAL_DIR = working_folder()
    module._current_process = type(module._current_process)()  # with a key of its own
    module._parent_process = None


def _renew_numpy(module: Any) -> None:
    module.seed()


def _renew_torch(module: Any) -> None:
    module.default_generator.seed()
    store.warm()  # as the import hook of a program does


def _renew_logging(module: Any) -> None:
    module._startTime = time.time_ns() if isinstance(module._startTime, int) else time.time()


RENEWED: dict[str, Callable[[Any], None]] = {
    "multiprocessing": _renew_multiprocessing,
    "multiprocessing.process": _renew_processes,
    "numpy.random.mtrand": _renew_numpy,
    "logging": _renew_logging,
    "torch": _renew_torch,
}


def renew(names: Sequence[str]) -> None:
    """The same for modules that are in sight from the start."""
    for name in names:
        if name in RENEWED and name in sys.modules:
            RENEWED[name](sys.modules[name])
