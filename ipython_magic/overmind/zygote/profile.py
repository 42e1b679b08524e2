# SPDX-License-Identifier: MIT
"""What starts of one kind import: a file beside the zygote's socket, written as each program ends.

Only modules of site-packages and of the standard library are noted, never the user's own. The file holds no value of
any variable: where a program changes its environment before an import, names and hashes are kept.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from overmind.patching import ImportHooks
from overmind.zygote import generator

_PAUSE = 1.0  # seconds
KERNEL_SESSIONS = 10  # kernels without it until a module is forgotten

# Source that may change the environment. A program with such a line is learned anew after each edit of it.
WRITES_ENVIRONMENT = re.compile(
    rb"environb?\s*\[[^\]]*\]\s*=[^=]|environb?\s*\.\s*(?:update|setdefault|pop|popitem|clear|__setitem__)\b"
    rb"|\b(?:un|put)(?:set)?env\b|dotenv|environb?\s*\|=|\bdel\s+(?:os\s*\.\s*)?environ"
)
SEEDS = re.compile(rb"seed|setstate")


@dataclass
class Profile:
    """`modules`: name -> the session that imported it last, in order of import. `changed`: from the import of that
    number on, these variables differed from the start. `refused`: what must not be imported ahead, and why. `files`:
    stamps of the program's own source."""

    session: int = 0
    modules: dict[str, int] = field(default_factory=dict)
    changed: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)

    def changed_before(self, name: str) -> dict[str, str]:
        """Hashes of the variables that had changed when `name` was imported."""
        number = next((at for at, each in enumerate(self.modules) if each == name), -1)
        found: dict[str, str] = {}
        for first, values in self.changed:
            if first <= number:
                found = values
        return found


def load(path: str) -> Profile:
    """The profile at `path`; an empty one if there is none or it can't be read."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
        return Profile(
            int(value["session"]),
            {str(name): int(last) for name, last in value["modules"].items()},
            [(int(first), dict(values)) for first, values in value["changed"]],
            {str(name): str(why) for name, why in value["refused"].items()},
            {str(name): list(stamp) for name, stamp in value["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Profile()


def save(path: str, profile: Profile) -> None:
    """Replaces the file in one step. A disk that is full loses the lesson, nothing else."""
    mine = f"{path}.{os.getpid()}"
    try:
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(vars(profile)))  # dump() and asdict() take 25 ms for 4,000 modules, this 3
        os.replace(mine, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(mine)


def refusal(refused: Mapping[str, str], name: str) -> str | None:
    """Why `name` must not be imported ahead, if so: with each module its packages are imported."""
    parts = name.split(".")
    return next((why for end in range(len(parts)) if (why := refused.get(".".join(parts[: end + 1])))), None)


def hash_of(value: str | bytes | None) -> str:
    """Compares without telling."""
    if value is None:
        return ""
    return hashlib.sha256(value if isinstance(value, bytes) else os.fsencode(value)).hexdigest()[:16]


def stamp_of(path: str) -> list[int]:
    """[] if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def may_change_environment(path: str) -> bool:
    """Whether the source has a line that could; True if it can't be read."""
    return _has(path, WRITES_ENVIRONMENT)


def may_seed(path: str) -> bool:
    """The same for the random numbers."""
    return _has(path, SEEDS)


def _has(path: str, pattern: re.Pattern[bytes]) -> bool:
    try:
        with open(path, "rb") as file:
            return pattern.search(file.read()) is not None
    except OSError:
        return True


class Origins:
    """Tells a library's module from a user's, by where its file lies."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()  # imports a module, the first time
        folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()}
        if site.ENABLE_USER_SITE:
            folders.add(site.getusersitepackages())
        self._libraries = tuple(sorted({os.path.join(os.path.abspath(folder), "") for folder in folders}))

    def is_library(self, module: ModuleType | None) -> bool:
        """Of site-packages, of the standard library, or built in."""
        try:
            spec = vars(module).get("__spec__")
        except TypeError:
            return False
        if spec is None or getattr(spec, "origin", None) is None:
            return False
        if spec.origin in ("built-in", "frozen"):
            return True
        return bool(spec.has_location) and str(spec.origin).startswith(self._libraries)


def outer_first(completed: Sequence[str], begun: Mapping[str, int]) -> list[str]:
    """In the order of `completed`, but an import comes before those of its own package that it made meanwhile: what it
    did around them (tqdm.auto, say, silences a warning) holds for them again. `begun`: when each began; those that are
    not there stay where they are."""
    outermost: dict[str, str] = {}  # of each package, going back in time
    enclosed: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for name in reversed(completed):
        began, package = begun.get(name), name.partition(".")[0]
        outer = outermost.get(package)
        if began is None:
            outer = name
        elif outer is None or begun[outer] > began:
            outermost[package] = outer = name
        enclosed.setdefault(outer, []).append(name)
        first[outer] = name
    at = {name: outer for outer, name in first.items()}
    found = []
    for name in completed:
        if name in at:
            found += sorted(enclosed[at[name]], key=lambda each: begun.get(each, 0))
    return found


_ORIGINS = Origins()  # now: in a program, an import of ours would be taken for its own


class Learner:
    """Notes what this process imports, and writes it down when the process ends, or when `note()` is called."""

    def __init__(self, path: str, mode: str, target: str) -> None:
        self._path = path
        self._mode = mode
        self._script = os.path.abspath(target) if mode == "script" else None
        self._native = frozenset(sys.modules)
        self._start = self._environment()
        self._last: Mapping[str, str] = {}
        self._changed: list[tuple[int, dict[str, str]]] = []  # by the length of sys.modules
        self.is_ahead: Callable[[str, Any], bool] = lambda _name, _module: False  # imported ahead: of a library
        self.is_known: Callable[[str], bool] = lambda _name: False  # the same, by the name alone
        self._new: list[str] = []  # what was asked for, and is not known
        self._random: Any = None  # its state at the last look
        self._seeded = False
        self._refused: dict[str, str] = {}
        self._begun: dict[str, int] = {}  # by which imports began
        self._session: int | None = None
        self._count = 0
        self._pid = os.getpid()

    @staticmethod
    def _environment() -> dict[Any, Any]:
        return dict(os.environ._data)  # type: ignore[attr-defined]

    def watch(self) -> None:
        """From now on. Called once."""
        self._pid = os.getpid()
        self._native = frozenset(sys.modules)
        self._start = self._environment()
        sys.meta_path.insert(0, self)
        ImportHooks().add("random", lambda _module: self._note_random())
        atexit.register(self._end)

    def rebase(self) -> None:
        """What the environment is now, it is at the start."""
        self._start, self._last, self._changed = self._environment(), {}, []
        self._note_random()

    def conflict(self, name: str, why: str) -> None:
        """`name` must not be imported ahead in later zygotes of this kind."""
        self._refused[name] = why

    def began(self, names: Sequence[str]) -> None:
        """Their imports began now, in this order. Names that are known keep their place."""
        for name in names:
            self._begun.setdefault(name, len(self._begun))

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Part of the import system (importlib.abc.MetaPathFinder): looks, and finds nothing. 10 us an import."""
        self._begun.setdefault(fullname, len(self._begun))
        if not self.is_known(fullname):
            self._new.append(fullname)
        self._look_at_random()
        now = os.environ._data  # type: ignore[attr-defined]
        if now == self._start and not self._last and not self._seeded:
            return
        changed = {
            os.fsdecode(name): hash_of(now.get(name))
            for name in now.keys() | self._start.keys()
            if now.get(name) != self._start.get(name)
        }
        if self._seeded:
            changed[generator.SEEDED] = "yes"
        if changed != self._last:
            self._last = changed
            self._changed.append((len(sys.modules), changed))

    def _note_random(self) -> None:
        self._random, self._seeded = generator.state(), False

    def _look_at_random(self) -> None:
        """8 us, until it was seeded."""
        if self._random is None or self._seeded or (now := generator.state()) is None:
            return
        self._seeded = not generator.only_drawn(self._random, now)
        self._random = now

    def _end(self) -> None:
        """A kernel that taught nothing new is not kept from its end: 25 ms, for most pages are the zygote's yet."""
        new = any(name in sys.modules and name.partition(".")[0] != "overmind" for name in self._new)
        if self._mode != "kernel" or self._refused or new:
            self.note()

    def note(self) -> None:
        """Writes what was learned, if anything was. Cheap when nothing new was imported. Never raises."""
        if os.getpid() != self._pid or (len(sys.modules) == self._count and not self._refused):
            return  # a fork of the program; or nothing new
        self._count = len(sys.modules)
        with contextlib.suppress(Exception):
            self._write()

    def _write(self) -> None:
        imported = list(sys.modules.items())
        found: list[str] = []
        files: dict[str, list[int]] = {}
        numbers = [0]  # of library modules among the first of sys.modules
        for name, module in imported:
            numbers.append(len(found))
            if name in self._native or name == "__main__" or name.partition(".")[0] == "overmind":
                continue
            if self.is_ahead(name, module) or _ORIGINS.is_library(module):
                found.append(name)
            elif isinstance(origin := getattr(getattr(module, "__spec__", None), "origin", None), str):
                files[origin] = stamp_of(origin)
        if self._script is not None:
            files[self._script] = stamp_of(self._script)
        old = load(self._path)
        changed = [(numbers[min(first, len(numbers) - 1)], values) for first, values in self._changed]
        if self._session is None:
            if self._mode == "kernel" and self._was_last(old, found, changed, files):
                return
            self._session = old.session + 1
        modules = dict.fromkeys(outer_first(found, self._begun), self._session)
        if self._mode == "kernel":
            kept = {name: last for name, last in old.modules.items() if last > self._session - KERNEL_SESSIONS}
            modules = {**kept, **modules}
        save(self._path, Profile(self._session, modules, changed, {**old.refused, **self._refused}, files))

    def _was_last(
        self, old: Profile, found: list[str], changed: list[tuple[int, dict[str, str]]], files: dict[str, list[int]]
    ) -> bool:
        """Whether the last session taught the same: a notebook that is restarted again and again. To write it takes as
        long as to find that out."""
        if (old.changed, old.files) != (changed, files) or not self._refused.items() <= old.refused.items():
            return False
        return {name for name, last in old.modules.items() if last == old.session} == set(found)


_learner: Learner | None = None
_ready = -1
_forked = False
_planned = False


def begin(learner: Learner | None, *, ready: int = -1, forked: bool = False) -> None:
    """This process is a program now. `ready`: closed at the first look(), so that a zygote may be made."""
    global _learner, _ready, _forked
    _learner, _ready, _forked = learner, ready, forked
    if learner is not None:
        learner.watch()


def kernel_is_made() -> None:
    """What an engine itself did to the environment is not the program's doing."""
    if _learner is not None:
        _learner.rebase()


def forked() -> bool:
    """Whether this program runs in a fork of a zygote."""
    return _forked


def look() -> None:
    """For a kernel, after each cell: what was imported is noted, and the first time a zygote may be made. 20 us.

    A fork knows most of it already, and notes the rest when a second has passed: to write it takes 10 ms, which a
    restarted notebook's first cells would wait for. What is new and not noted then is when the program ends.
    """
    global _ready
    if _forked:
        _look_later()
    elif _learner is not None:
        _learner.note()
    if _ready >= 0:
        os.close(_ready)
        _ready = -1


def _look_later() -> None:
    global _planned
    if _planned or _learner is None:
        return
    import asyncio  # a kernel has it; a script may not, and would be taken to have asked for it

    with contextlib.suppress(RuntimeError):  # a cell is run by something that is no event loop
        asyncio.get_running_loop().call_later(_PAUSE, _note_planned)
        _planned = True


def _note_planned() -> None:
    global _planned
    _planned = False
    if _learner is not None:
        _learner.note()
