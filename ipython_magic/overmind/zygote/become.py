# SPDX-License-Identifier: MIT
"""A fork of the zygote becomes the program that was asked for: what a fresh interpreter would have, it gets."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import linecache
import os
import re
import resource
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import BuiltinImporter
from types import ModuleType
from typing import Any, NoReturn

from overmind import _core, store
from overmind.zygote import profile, stash
from overmind.zygote.engines import ENGINES
from overmind.zygote.wire import Request

Pids = list[tuple[Any, str]]
Mains = list[tuple[dict[str, Any], str]]

_F_SETSIG = 10
_SITE_PACKAGES = sysconfig.get_path("purelib")  # now: in a program, its import would be taken for the program's own


class Leave(BaseException):
    """Leaves every frame of this program; what runs next is in sys.excepthook."""


def leave(mode: str, target: str, arguments: Sequence[str]) -> NoReturn:
    """Runs the program in place of this one. REQUIRES: new_main() and describe() were called; no handler from here to
    the top."""
    shown = sys.excepthook
    if mode == "script":
        path = target if os.path.isabs(target) else os.path.join(os.getcwd(), target)
        sys.excepthook = functools.partial(_core.run_file, path, shown)
    elif mode == "module":
        import runpy  # as the interpreter does for -m

        module = functools.partial(runpy._run_module_as_main, target)  # type: ignore[attr-defined]
        sys.excepthook = functools.partial(_core.run_call, module, shown)
    else:
        serve = functools.partial(ENGINES[target].serve, arguments)
        sys.excepthook = functools.partial(_core.run_kernel, serve, shown)
    raise Leave


def describe(mode: str, target: str, arguments: Sequence[str]) -> None:
    """sys.argv and sys.path[0] as `python target arguments` has them."""
    if mode == "script":
        sys.argv = [target, *arguments]
        sys.orig_argv = [sys.executable, *sys.argv]
        first = os.path.dirname(os.path.realpath(target))
    elif mode == "module":
        sys.argv = ["-m", *arguments]
        sys.orig_argv = [sys.executable, "-m", target, *arguments]
        first = stash.working_folder() or ""
    else:
        sys.argv = [os.path.join(_SITE_PACKAGES, f"{target}_launcher.py"), *arguments]
        sys.orig_argv = [sys.executable, "-m", f"{target}_launcher", *arguments]
        first = ""
    if first and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first)


def new_main() -> None:
    """An empty __main__. Before anything of an engine's: a shell puts its own in the place of what it finds, and takes
    the cells' classes from there when they are pickled."""
    # A new module: frames of the old one are held until the end, and a program's globals must not be.
    annotated = "__annotations__" in vars(sys.modules["__main__"])
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__loader__ = BuiltinImporter
    if annotated:
        main.__annotations__ = {}
    vars(main)["__builtins__"] = sys.modules["builtins"]


def settle(request: Request, hidden: stash.Stash, folder: int, pids: Pids, mains: Mains) -> None:
    """Everything but the descriptors: called when they are in place."""
    os.umask(request.umask)
    os.fchdir(folder)
    os.environ.clear()
    for entry in request.environment:
        name, _, value = entry.partition(b"=")
        if name:
            os.environb[name] = value
    hidden.apply_environment()
    time.tzset()
    for number in request.ignored - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    for owner, held in pids:
        if isinstance(owner, type):
            type.__setattr__(owner, held, os.getpid())
        else:
            owner[held] = os.getpid()
    for names, held in mains:
        names[held] = sys.modules["__main__"]
    main = threading.main_thread()
    if hasattr(main, "_set_native_id"):
        main._set_native_id()
    linecache.clearcache()
    store.connects_ahead = True
    stash.renew([name for name in stash.RENEWED if name in sys.modules])
    for stream, number in ((sys.stdin, 0), (sys.stdout, 1), (sys.stderr, 2)):
        reopen(stream, number)


def reopen(stream: Any, number: int) -> None:
    """Makes a standard stream anew around its descriptor, as the interpreter does at its start. The object stays the
    same one: handlers and libraries hold it."""
    unbuffered = stream.write_through
    encoding, errors, name = stream.encoding, stream.errors, stream.name
    stream.detach()
    writes = number > 0
    buffer: Any = open(number, "wb" if writes else "rb", 0 if unbuffered and writes else -1, closefd=False)  # noqa: SIM115
    raw = buffer if isinstance(buffer, io.FileIO) else buffer.raw
    raw.name = name
    stream.__init__(
        buffer,
        encoding=encoding,
        errors=errors,
        newline="\n",
        line_buffering=not unbuffered and (raw.isatty() or number == 2),
        write_through=unbuffered,
    )


def own_mains(modules: Sequence[Any]) -> Mains:
    """Variables of modules that hold the main module, which is another one in each program: dill pickles by it,
    rlcompleter completes in it. Each as the dictionary that it is in, and its name there."""
    main = sys.modules["__main__"]
    return [(names, name) for names in _namespaces(modules) for name, value in list(names.items()) if value is main]


def own_pids(modules: Sequence[Any]) -> Pids:
    """Variables that hold this process's id, by value and by a name that says so: of modules, of their classes and of
    the objects that they hold. Each as its class, or the dictionary that it is in, and its name there."""
    owners: dict[int, Any] = {}
    for names in _namespaces(modules):
        owners[id(names)] = names
        for value in list(names.values()):
            if issubclass(type(value), type):  # isinstance() asks the value, too: torch.distributed.reduce_op warns
                owners[id(value)] = value
            elif type(held := _dictionary_of(value)) is dict:
                owners[id(held)] = held
    found = []
    for owner in owners.values():
        for name, value in list((vars(owner) if isinstance(owner, type) else owner).items()):
            if type(value) is int and value == os.getpid() and re.search("pid", str(name), re.IGNORECASE):
                found.append((owner, name))
    return found


def _namespaces(modules: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Of whatever stands in sys.modules, but for what has none."""
    for module in modules:
        with contextlib.suppress(TypeError):
            yield vars(module)


def _dictionary_of(value: object) -> object:
    """Its attributes, past whatever it does to those who ask; None for what is no plain object."""
    try:
        return None if type(value) is ModuleType else object.__getattribute__(value, "__dict__")
    except Exception:
        return None


def _end_of_table(room: int) -> int:
    """A number of a descriptor that leaves `room` for others behind it."""
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)
    return max(limit - room, 3)


def out_of_the_way(descriptor: int) -> int:
    """Moves it to where the program's own will hardly come, and closes it for what the program runs."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _end_of_table(8))
    os.close(descriptor)
    return moved


def place_descriptors(received: Sequence[int], numbers: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Puts `received` at `numbers`, closes every other one but `kept`; returns where those are now: out of the way, at
    the end of the table, so that the program's first file gets the number that it always gets."""
    floor = _end_of_table(300)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in (*kept, *received)]
    top = moved[: len(kept)]
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):
        if fd not in moved:
            try:
                os.close(fd)
            except OSError:
                continue  # the listing's own
    for source, number in zip(moved[len(kept) :], numbers, strict=True):
        os.dup2(source, number)
        os.close(source)
    return top


def die_with(life: int, group: bool) -> None:
    """The kernel kills this process (or its group) as soon as the other end of the pipe `life` is closed, however the
    launcher ends. No thread, no polling."""
    fcntl.fcntl(life, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpid() if group else os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    # It may have been closed before; then no signal comes.
    os.set_blocking(life, False)
    try:
        if os.read(life, 1) == b"":
            os._exit(1)
    except BlockingIOError:
        pass


def announce(connection: int, quick_end: bool) -> None:
    """Tells the launcher that the program runs; from here on nothing may fail. Raises OSError if it has given up."""
    process = os.pidfd_open(os.getpid())
    with socket.socket(fileno=os.dup(connection)) as channel:
        socket.send_fds(channel, [b"run %d" % os.getpid()], [process])
    os.close(process)
    _core.report_exit(connection, quick_end)


def learn(path: str, mode: str, target: str, hidden: stash.Stash) -> None:
    """Begins to learn what this program imports."""
    learner = profile.Learner(path, mode, target)
    learner.is_ahead = hidden.has
    learner.is_known = hidden.knows
    hidden.on_conflict = learner.conflict
    hidden.on_reveal = learner.began
    profile.begin(learner, forked=True)
