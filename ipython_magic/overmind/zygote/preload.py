# SPDX-License-Identifier: MIT
"""Imports ahead of need, one after the other, and what each of them did besides defining modules.

What can be done again in a fork is kept and done again there: variables of the environment, warning filters,
warnings, log records, functions for the exit, targets of comms. An import that does anything else (a thread, an open
file, output, a signal handler) is refused, and a zygote that has made one is made anew without it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import importlib
import locale
import logging
import os
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from overmind import replay
from overmind.patching import ImportHooks
from overmind.zygote import generator, standin

# Read by C code when a library is loaded, past os.environ.
C_PREFIXES = ("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "TORCH_", "PYTORCH_", "ATEN_", "LD_")
RAISED = "it raised "  # how a reason begins
_GPU = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/habana")


@dataclass
class Group:
    """One import, and all modules that came with it."""

    name: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)  # variables that it asked for
    reads_all: bool = False  # it went through all of them
    environment: dict[str, str | None] = field(default_factory=dict)  # variables that it set; None: removed
    filters_front: list[Any] = field(default_factory=list)
    filters_back: list[Any] = field(default_factory=list)
    messages: list[list[Any]] = field(default_factory=list)
    at_exit: list[tuple[Callable[..., object], Any, Any]] = field(default_factory=list)  # as for atexit.register()
    targets: dict[str, Any] = field(default_factory=dict)  # of comms
    draws: bool = False  # numbers from `random`

    @functools.cached_property
    def packages(self) -> frozenset[str]:
        """Names that a file of the user's could take the place of."""
        return frozenset(name.partition(".")[0] for name in self.modules)

    @functools.cached_property
    def has_code_of_c(self) -> bool:
        """Whether one of the modules is an extension, which may read variables past os.environ."""
        origins = (getattr(getattr(module, "__spec__", None), "origin", None) for module in self.modules.values())
        return any(str(origin).endswith(".so") for origin in origins)

    def settle(self) -> None:
        """Finds out now what each program will ask: one that looks at every module copies the pages they lie in."""
        _ = self.packages, self.has_code_of_c

    def concerns(self, name: str) -> bool:
        """Whether the import may have looked at the variable `name`."""
        if name == generator.SEEDED:
            return self.draws
        if name in self.reads or (self.has_code_of_c and name.startswith(C_PREFIXES)):
            return True
        return self.reads_all and any(package.upper() in name.upper() for package in self.packages if len(package) > 2)


class RefusedError(Exception):
    """The import did what a fork can't do again; its text says what."""


def load(name: str, shell: type | None = None, refused: Collection[str] = ()) -> Group | None:
    """Imports `name`; None if it is there already, or nowhere. Raises RefusedError; this process is then no longer
    clean. `shell`: the kind of the shell that will be there when the program imports it. `refused`: who imports one of
    them is refused, too, now and not in a zygote made anew for each of a hundred modules."""
    if name in sys.modules:
        return None
    group = Group(name)
    before = set(sys.modules)
    environment = dict(os.environ)
    filters = list(warnings.filters)
    witness, tasks, targets = _witness(), task_count(), dict(standin.comm_targets())
    with _listening(group), _at_exit_later(group), _meeting(refused) as met, standin.shell(shell) as asked:
        try:
            importlib.import_module(name)
        except BaseException as error:  # whatever it is, the program shall see it itself
            if isinstance(error, ModuleNotFoundError) and error.name == name and set(sys.modules) == before:
                return None  # another name that a library gives to one of its modules
            if asked:
                raise RefusedError(f"it asks the running shell for {asked[0]}") from None
            raise RefusedError(f"{RAISED}{type(error).__name__}: {error}") from None
    group.draws = _drew()
    changed = [part for part, value in _witness().items() if value != witness[part]]
    if asked:
        raise RefusedError(f"it asks the running shell for {asked[0]}")
    if changed:
        raise RefusedError(f"importing it changed {', '.join(changed)}")
    if met:
        raise RefusedError(f"it imports {min(met)}, which is not imported ahead")
    if task_count() > tasks and (why := unfit()) is not None:
        raise RefusedError(f"after its import the process can't be forked: {why}")
    group.modules = {each: module for each, module in sys.modules.items() if each not in before}
    for module in group.modules.values():
        with contextlib.suppress(TypeError):
            vars(module).pop("__warningregistry__", None)  # a warning said here is one that the program has not seen
    now = dict(os.environ)
    group.environment = {
        key: now.get(key) for key in now.keys() | environment.keys() if now.get(key) != environment.get(key)
    }
    _split_filters(group, filters)
    _take_targets(group, targets)
    return group


def forget(native: frozenset[str]) -> None:
    """Takes out of sight what this package itself needed beyond a program's `overmind.enable()`: it keeps its copies,
    and who imports one of them from here on gets one of his own."""
    for name in [name for name in sys.modules if name not in native and name.partition(".")[0] != "overmind"]:
        module = sys.modules.pop(name)
        parent, _, child = name.rpartition(".")
        owner = sys.modules.get(parent)
        if owner is not None and vars(owner).get(child) is module:
            delattr(owner, child)


def _split_filters(group: Group, before: list[Any]) -> None:
    now = list(warnings.filters)
    for at in range(len(now) - len(before) + 1):
        if now[at : at + len(before)] == before:
            group.filters_front, group.filters_back = now[:at], now[at + len(before) :]
            return
    raise RefusedError("importing it changed the warning filters that there were")


def _take_targets(group: Group, before: dict[str, Any]) -> None:
    now = standin.comm_targets()
    if any(now.get(name) is not target for name, target in before.items()):
        raise RefusedError("importing it changed the targets of comms that there were")
    group.targets = {name: target for name, target in now.items() if name not in before}
    for name in group.targets:
        del now[name]


class _ReadEnviron(os._Environ):  # type: ignore[type-arg]
    """os.environ while it is watched: `group.reads` gets each variable that is asked for, whether it is set or not.

    Who goes through all of them (`dict(os.environ)`, a search for a prefix) looks for his own: of those only names
    that hold the name of a package count, see Group.concerns().
    """

    group: Group
    pending: list[str]  # names that were gone through, and whose values come next

    def __getitem__(self, key: str) -> str:
        pending = _ReadEnviron.pending
        if pending and pending[0] == key:
            pending.pop(0)
        else:
            _ReadEnviron.group.reads.add(key)
        return str(super().__getitem__(key))

    def __iter__(self) -> Iterator[str]:
        _ReadEnviron.pending = pending = []
        _ReadEnviron.group.reads_all = True
        for key in super().__iter__():
            pending.append(key)
            yield key


@contextlib.contextmanager
def _listening(group: Group) -> Iterator[None]:
    """Notes what is read and said meanwhile; nothing is shown."""
    _ReadEnviron.group, _ReadEnviron.pending = group, []

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        group.messages.append(replay.of_warning(message, category, filename, lineno))

    def handle(_logger: logging.Logger, record: logging.LogRecord) -> None:
        group.messages.append(replay.of_record(record))

    shown, handled, kind = warnings.showwarning, logging.Logger.handle, type(os.environ)
    warnings.showwarning = show
    logging.Logger.handle = handle  # type: ignore[method-assign,assignment]
    os.environ.__class__ = _ReadEnviron
    try:
        yield
    finally:
        os.environ.__class__ = kind
        logging.Logger.handle = handled  # type: ignore[method-assign]
        warnings.showwarning = shown


@contextlib.contextmanager
def _at_exit_later(group: Group) -> Iterator[None]:
    """Keeps what modules of this import register for the exit: the program may never import them. One that was there
    before (weakref, for its finalizers) may register only once in a process, so it does."""
    native = frozenset(sys.modules)
    register_now, unregister_now = atexit.register, atexit.unregister
    waits = True  # a library may keep these two for later

    def register(function: Callable[..., object], /, *args: Any, **options: Any) -> Callable[..., object]:
        if waits and sys._getframe(1).f_globals.get("__name__") not in native:
            group.at_exit.append((function, args, options))
            return function
        return register_now(function, *args, **options)

    def unregister(function: Callable[..., object]) -> None:
        if waits:
            group.at_exit[:] = [each for each in group.at_exit if each[0] != function]
        unregister_now(function)

    atexit.register, atexit.unregister = register, unregister  # type: ignore[assignment]
    try:
        yield
    finally:
        waits = False
        atexit.register, atexit.unregister = register_now, unregister_now


@contextlib.contextmanager
def _meeting(wanted: Collection[str]) -> Iterator[set[str]]:
    """Gets those of `wanted` that an import statement names meanwhile, also if they are there already."""
    met: set[str] = set()
    if not wanted:
        yield met
        return
    real, names = builtins.__import__, set(wanted)

    def ask(name: str, scope: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        base = name
        if level > 0:
            package = str((scope or {}).get("__package__") or "").rsplit(".", level - 1)[0]
            base = f"{package}.{name}" if name else package
        met.update({base, *(f"{base}.{part}" for part in fromlist or ())} & names)
        return real(name, scope, local, fromlist, level)

    builtins.__import__ = ask  # type: ignore[assignment]
    try:
        yield met
    finally:
        builtins.__import__ = real


def _witness() -> dict[str, object]:
    """State of the process that an import has no business with; cheap: 0.2 ms."""
    root = logging.getLogger()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return {
        "the threads": _threads(),
        "the open descriptors": _descriptors(),
        "the child processes": _children(),
        "its output": (os.fstat(1).st_size, os.fstat(2).st_size),
        "the working folder": os.getcwd(),
        "sys.path": list(sys.path),
        "the signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "the locale": locale.setlocale(locale.LC_ALL),
        "the standard streams": (sys.stdin, sys.stdout, sys.stderr),
        "the hooks of sys": (sys.excepthook, sys.displayhook, sys.unraisablehook, sys.gettrace(), sys.getprofile()),
        "the root logger": (root.level, list(root.handlers), logging.root.manager.disable),
        "the collector": (gc.isenabled(), gc.get_threshold()),
        "the limits of the interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), threading.stack_size()),
        "the random numbers": _random_states(),
        "the time limit of sockets": socket.getdefaulttimeout(),
    }


# A generator that an import seeds must not be seeded anew in a fork; how each is read.
_GENERATORS: dict[str, Callable[[Any], object]] = {
    "random": generator.state,
    "numpy.random": lambda module: hash(module.get_state(legacy=True)[1].tobytes()),
    "torch": lambda module: module.initial_seed(),
}
_fresh: dict[str, object] = {}  # what each was when its module had just been imported, or an import had drawn from it
_hooks = ImportHooks()


def watch_generators() -> None:
    """Called once, before the first load()."""
    for name, read in _GENERATORS.items():
        _hooks.add(name, lambda module, name=name, read=read: _fresh.update({name: read(module)}))  # type: ignore[misc]


def leave_generators() -> None:
    """In a fork: nothing is compared any more."""
    _hooks.remove()


def _drew() -> bool:
    """Whether numbers were drawn from `random`, and that was all. Asked once after each import."""
    before, now = _fresh.get("random"), generator.state()
    if before is None or now is None or now == before or not generator.only_drawn(before, now):
        return False
    _fresh["random"] = now
    return True


def _random_states() -> list[str]:
    return [name for name, fresh in _fresh.items() if _GENERATORS[name](sys.modules[name]) != fresh]


def _threads() -> int:
    """Python's own; those of C libraries are looked at when all is loaded: OpenBLAS has some, and a fork ends them."""
    return threading.active_count()


def _descriptors() -> frozenset[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{name}:{os.readlink(f'/proc/self/fd/{name}')}")
    return frozenset(each for each in found if "/proc/" not in each)


def _children() -> str:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read()


def task_count() -> int:
    """Threads of this process, C libraries' own included."""
    return len(os.listdir("/proc/self/task"))


# Packages whose C code does nothing at exit but to free memory. Destructors of libtorch alone take 0.2 to 0.4 s in a
# fork, for they write to pages that are shared until then. h5py, for one, is not here: it writes files at exit.
_SILENT = frozenset(
    [
        "PIL",
        "_cffi_backend",
        "charset_normalizer",
        "debugpy",
        "google",
        "hf_xet",
        "markupsafe",
        "msgpack",
        "numpy",
        "numpy.libs",
        "overmind",
        "pandas",
        "pillow.libs",
        "psutil",
        "pydantic_core",
        "pyzmq.libs",
        "regex",
        "rpds",
        "safetensors",
        "scikit_learn.libs",
        "scipy",
        "scipy.libs",
        "sentencepiece",
        "sklearn",
        "tokenizers",
        "torch",
        "tornado",
        "yaml",
        "zmq",
    ]
)


def ends_in_silence() -> bool:
    """Whether all extension modules that are loaded are the interpreter's own, or of packages known to be silent."""
    for module in list(sys.modules.values()):
        origin = str(getattr(getattr(module, "__spec__", None), "origin", None))
        if not origin.endswith(".so") or "/lib-dynload/" in origin:
            continue
        package = origin.rpartition("/site-packages/")[2].partition("/")[0]
        if package.partition(".cpython")[0].partition(".abi3")[0] not in _SILENT:
            return False
    return True


def spare_the_exit() -> None:
    """Of the imports until now. torch takes its operators back one by one as a process ends, and nobody is told of it:
    in a fork, where that copies the pages that they lie in, 50 of the 140 ms that a kernel takes to end."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", None) == "torch.library":
            finalizer.atexit = False


def unfit() -> str | None:
    """Why this process must not be forked; None if it may be.

    OpenBLAS starts threads when it is loaded and ends them itself before a fork, so one fork is made to see what is
    left after it.
    """
    if threading.active_count() > 1:
        return f"it has {threading.active_count()} threads"
    if task_count() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    if task_count() > 1:
        return f"it has {task_count()} threads that outlive a fork"
    held = [each for each in _descriptors() if each.partition(":")[2].startswith(_GPU)]
    if held:
        return f"it holds a device: {held[0]}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is in use"
    return None
