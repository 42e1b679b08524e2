# SPDX-License-Identifier: MIT
"""Watches one native load: what it reads, says, and leaves changed.

Nothing of the load is altered: its exceptions pass, its warnings and records show as ever. The hooks for warnings
and log records are process-wide and put in place once for all loads that run at a time; each notes only what comes
from a thread with a recording, or from one that was started while the only recording ran (transformers loads
weights in a thread pool).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import random
import sys
import threading
import time
import types
from collections.abc import Iterable
from typing import Any

from overmind import _core, ambient, dependencies, draws, frames, hub, modules, replay, signals
from overmind.encoding import Uncacheable
from overmind.key import Request, encode_arguments
from overmind.warning_hook import WarningHook

MAX_MESSAGES = 1000
_ADDED_BY_FORMATTERS = {"message", "asctime"}

_local = threading.local()


class Recording:
    """Context manager around one native load, on the thread that runs it. Inside another one it does nothing.

    After a load that raised nothing: `refusal` is why its result can't be cached, or None; `dependencies` and
    `messages` are what an entry keeps (JSON).
    """

    def __init__(self, request: Request) -> None:
        self.refusal: str | None = None
        self.dependencies: list[list[Any]] = []
        self.messages: list[list[Any]] = []
        self._request = request
        self._outermost = False

    def __enter__(self) -> Recording:
        if getattr(_local, "recording", None) is not None:
            return self
        try:
            self._start()
        except BaseException as error:
            self._abandon()
            if not isinstance(error, Exception):
                raise
            signals.pass_on(error)
            # The load must go on; it just can't be cached.
            self.refusal = f"what it reads could not be watched ({type(error).__name__}: {error})"
        return self

    def _start(self) -> None:
        self._modules = _ImportedModules()
        self._unreadable = False
        self._records: list[tuple[logging.LogRecord, set[str]]] = []
        self._random = _RandomState()
        self.draws = draws.Draws()
        self.refusal = self._other_modes()  # another thread may have set them since the key was made
        self._threads = {thread.ident for thread in threading.enumerate()}
        self._start_ns = time.time_ns()
        _forget_recording()
        _core.start_recording()
        _local.recording = self
        _hooks.enter(self)
        self._outermost = True

    def _abandon(self) -> None:
        if getattr(_local, "recording", None) is self:
            _local.recording = None
        _hooks.leave(self)
        _forget_recording()

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: types.TracebackType | None
    ) -> None:
        if not self._outermost:
            return
        _local.recording = None
        _hooks.leave(self)
        try:
            events = _core.stop_recording()
            if kind is None and self.refusal is None:
                self._conclude(events)
        except Exception as error:  # the load itself went well, or its own exception is on its way
            signals.pass_on(error)
            self.refusal = f"what it read could not be told ({type(error).__name__}: {error})"

    def _conclude(self, events: list[tuple[str, str, str]]) -> None:
        try:
            self.refusal = self._changed_state()
            if self.refusal is None:
                self.dependencies = self._collect(events)
        except (Uncacheable, dependencies.Refused) as refusal:
            self.refusal = str(refusal)

    def note(self, message: list[Any] | None) -> None:
        """Keeps a message of any thread; None for one that can't be read."""
        if message is None:
            self._unreadable = True
        else:
            self.messages.append(message)

    def note_record(self, record: logging.LogRecord) -> None:
        """Keeps a log record. What `extra=` adds comes after its making, so that is looked at when the load is done."""
        self.note(replay.of_record(record))
        self._records.append((record, set(vars(record))))

    def started(self, thread: int) -> bool:
        """True for a thread that did not exist when the load began."""
        return thread not in self._threads

    def _changed_state(self) -> str | None:
        consumed = self._random.consumed()
        if consumed is not None:
            return f"it consumed or seeded random numbers ({consumed})"
        drawn = self.draws.source()
        if drawn is not None and (self._request.generic or self._request.code):  # a library's own loader names files
            return f"it drew random numbers from the system ({drawn})"
        modes = self._other_modes()
        if modes is not None:
            return modes
        if len(self.messages) > MAX_MESSAGES:
            return f"it said {len(self.messages)} warnings and log records"
        if self._unreadable:
            return "it logged a message that can't be formatted"
        if any(vars(record).keys() - fields - _ADDED_BY_FORMATTERS for record, fields in self._records):
            return "it logged a record with fields of its own"
        try:
            encoder = encode_arguments(self._request.call)
        except Uncacheable as error:
            return f"it changed its arguments ({error})"
        name = encoder.difference(self._request.encoded)
        return None if name is None else f"it changed its argument {name!r}"

    def _other_modes(self) -> str | None:
        now, before = ambient.torch_state(), self._request.modes
        return None if now == before else f"torch's settings changed ({before or 'its own'} to {now or 'its own'})"

    def _collect(self, events: list[tuple[str, str, str]]) -> list[list[Any]]:
        request = self._request
        started = next((path for event, path, _mode in events if event == "process"), None)
        if started is not None and (request.generic or request.code):  # a library's own asks the machine, no more
            raise dependencies.Refused(f"it started another process ({started}), and what that one reads is not seen")
        events = [event for event in events if event[0] != "process"]
        folders = list(request.folders)
        if request.snapshot is not None:
            folders.append(request.snapshot.folder)
            refs = f"{request.snapshot.storage}/refs/"  # the commit is in the key, resolved anew at every call
            events = [event for event in events if not event[1].startswith(refs)]
        _check_repositories(request, [path for _event, path, _mode in events])
        opened = dependencies.Opened(self._start_ns, folders, request.files, request.generic)
        found = opened.collect(events)
        imported = [name for name in self._modules.since() if _is_own(name)]
        return [*found, *request.code, *dependencies.of_classes(imported)]


def note_draw(source: str) -> None:
    """Called by kernel_ext/random_watch.cc on the thread that draws. Raises what a signal handler does, no more."""
    recording = _hooks.of_this_thread()
    if recording is None:
        return
    try:
        recording.draws.note(source, sys._getframe(1))
    except Exception as error:
        signals.pass_on(error)
        recording.refusal = f"what it drew could not be told ({type(error).__name__}: {error})"


def _forget_recording() -> None:
    """Ends what an interrupted load of this thread left recording: the next one would be taken for a part of it."""
    with contextlib.suppress(RuntimeError):
        while True:
            _core.stop_recording()


class _ImportedModules:
    """What is imported from here on. sys.modules keeps its order: its end alone tells, unless modules were taken out
    meanwhile. That is 1 ms less of a first load than to compare 4,000 names."""

    def __init__(self) -> None:
        self._before = list(sys.modules)

    def since(self) -> Iterable[str]:
        # No bytecode between its steps: another thread's import can't come in between.
        found = list(itertools.takewhile(self._before[-1].__ne__, reversed(sys.modules)))
        if len(self._before) + len(found) == len(sys.modules):
            return found
        return set(sys.modules).difference(self._before)


def _is_own(name: str) -> bool:
    """A module of the user's own, with a source file."""
    module = sys.modules.get(name)
    if type(module) is not types.ModuleType or modules.installed(name):
        return False
    return modules.file_of(module) is not None


def _check_repositories(request: Request, paths: list[str]) -> None:
    """Only the target's commit is in the key. Offline, another repository's refs file is a dependency like any."""
    own = request.snapshot
    for path in paths:
        found = hub.repository_of(path)
        if found is None or (own is None and path.startswith(tuple(f"{folder}/" for folder in request.folders))):
            continue
        if own is not None and found[0] == own.storage:
            if found[1] != own.commit:
                raise dependencies.Refused(f"the repository moved to {found[1]} during the load")
        elif hub.online(request.call.arguments):
            raise dependencies.Refused(f"it read a second repository ({found[0]}), which the hub may move")


class _RandomState:
    """The global generators of random, numpy and torch. About 80 us to take with all three."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._torch = _torch_state()

    def consumed(self) -> str | None:
        """The library whose generator moved, or None."""
        if random.getstate() != self._python:
            return "random"
        numpy = _numpy_state()
        if numpy != self._numpy and not (self._numpy is None and _is_new_numpy(numpy)):
            return "numpy"
        torch = _torch_state()
        if torch != self._torch and not (self._torch is None and _is_new_torch()):
            return "torch"
        return None


def _numpy_state() -> tuple[Any, ...] | None:
    module = sys.modules.get("numpy.random.mtrand")
    if module is None:
        return None
    state = module._rand.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return (str(state),)
    return (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"])


def _is_new_numpy(state: tuple[Any, ...] | None) -> bool:
    """True if the generator was neither used nor seeded since the import: seeding leaves pos 624, a start 623."""
    return state is not None and len(state) == 4 and state[1:] == (623, 0, 0.0)


def _torch_state() -> tuple[bytes, ...] | None:
    torch = sys.modules.get("torch")
    if torch is None or "default_generator" not in vars(torch):
        return None
    states = [_bytes_of(torch.default_generator.get_state())]
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        states += [_bytes_of(generator.get_state()) for generator in cuda.default_generators]
    return tuple(states)


def _bytes_of(tensor: Any) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _is_new_torch() -> bool:
    """True if torch, imported during the load, has drawn nothing and was not seeded.

    Its own seed is 64 random bits, a user's is small: one in four billion own ones is taken for the user's.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    seed = torch.default_generator.initial_seed()
    fresh = torch.Generator()
    fresh.manual_seed(seed)
    same = _bytes_of(fresh.get_state()) == _bytes_of(torch.default_generator.get_state())
    return bool(same and seed >= 1 << 32)


class _Hook(WarningHook):
    """One installation of the hooks, over whatever was there. Idle, and only passing on, once it is not current."""

    def __init__(self) -> None:
        super().__init__()
        self._factory = logging.getLogRecordFactory()
        self._installed_factory = self.make_record  # a bound method is made anew at each access
        logging.setLogRecordFactory(self._installed_factory)

    def remove(self) -> None:
        super().remove()
        if logging.getLogRecordFactory() is self._installed_factory:
            logging.setLogRecordFactory(self._factory)

    def make_record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._factory(*args, **kwargs)
        collector = _hooks.collector(self)
        if collector is not None and record.name.partition(".")[0] != "overmind" and not frames.importing():
            try:
                collector.note_record(record)
            except Exception:  # the handler reports a message that can't be formatted, as ever
                collector.note(None)
        return record

    def takes(self, warning: tuple[Any, ...]) -> bool:
        message, category, filename, lineno, file, _ = warning
        collector = _hooks.collector(self)
        if collector is not None and file is None and not frames.importing():
            collector.note(replay.of_warning(message, category, filename, lineno))
        return False


class _Hooks:
    """Which recordings run, and the hook that serves them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[Recording] = []
        self._hook: _Hook | None = None

    def enter(self, recording: Recording) -> None:
        with self._lock:
            self._active.append(recording)
            if self._hook is None:
                self._hook = _Hook()

    def leave(self, recording: Recording) -> None:
        with self._lock:
            if recording in self._active:
                self._active.remove(recording)
            if not self._active and self._hook is not None:
                self._hook.remove()
                self._hook = None

    def collector(self, hook: _Hook) -> Recording | None:
        """The recording that a message on this thread belongs to."""
        return self.of_this_thread() if hook is self._hook else None

    def of_this_thread(self) -> Recording | None:
        """The recording that what this thread does belongs to."""
        own: Recording | None = getattr(_local, "recording", None)
        if own is not None:
            return own
        active = list(self._active)
        if len(active) == 1 and active[0].started(threading.get_ident()):
            return active[0]
        return None


_hooks = _Hooks()
