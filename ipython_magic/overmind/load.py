# SPDX-License-Identifier: MIT
"""One load, from the call to the object: key -> hit | miss | bypass.

Everything here but the native call itself is guarded: a fault of Overmind's own makes the load native, with a
reason in its record, and never an exception. The native call is made outside every `except`, so that its own
exceptions reach the caller as they are, with no foreign context.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from overmind import (
    _core,
    ambient,
    borrowing,
    collector,
    dependencies,
    encoding,
    foreign_code,
    journal,
    key,
    log,
    overlap,
    records,
    replay,
    signals,
    skeleton,
    store,
    substitution,
    waiting,
    worth,
)
from overmind.frames import passed_over
from overmind.loader import Loader
from overmind.quirks import torch_warnings
from overmind.recording import Recording
from overmind.records import LoadRecord

_INLINE_LIMIT = 8 << 20  # bytes written before the load returns: 8 MB take 6 ms, a fork of a process with diffusers 15
_STALE_TRIES = 3  # entries found changed in a row before a load goes native

_local = threading.local()


@dataclass
class _Hit:
    result: Any
    segment: _core.Segment
    request: key.Request
    meta: dict[str, Any]
    processor_seconds: float | None


@dataclass
class _Miss:
    request: key.Request
    lease: _core.Lease
    reason: str


@dataclass
class _Bypass:
    reason: str


@dataclass
class _Narrowed:
    reason: str


class _Unrestorable(Exception):  # noqa: N818 - an outcome, not a failure
    """An entry fails to be unpickled; str() says how."""


_failed: set[bytes] = set()  # keys of which an entry could not be restored in this process


def nested() -> bool:
    """True inside a native load that is being recorded on this thread: what it loads is part of its own result."""
    return bool(getattr(_local, "recording", False))


def warm(loaders: Iterable[tuple[Loader, Callable[..., Any]]] = ()) -> None:
    """Fills what is computed once in a process, and for each of these. Never raises, starts no daemon."""
    try:
        for loader, function in loaders:
            key.prepare(loader, function)
        ambient.warm()
        encoding.warm()
        skeleton.warm()
        foreign_code.warm()
        store.warm()
        _core.start_recording()  # finds what imports libc's open(): 5 ms with torch
        _core.stop_recording()
    except Exception:
        log.logger.debug("could not warm up", exc_info=True)


@passed_over
def call(
    loader: Loader,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    owner: type | None = None,
) -> Any:
    """What `function(*args, **kwargs)` gives, from the cache if that is provably the same.

    `function` is the original loader, already bound to `owner` if it is a classmethod. Thread-safe.
    """
    if nested():
        return function(*args, **kwargs)
    begun = time.perf_counter()
    attempt = _guarded(_attempt, loader, function, args, kwargs, owner)
    if isinstance(attempt, _Hit):
        segment = attempt.segment
        seconds = time.perf_counter() - begun
        nbytes = attempt.meta["nbytes"]
        _record(loader, segment.target, "hit", "", seconds, nbytes, segment.entry_id, segment.native_seconds)
        _guarded(worth.judge, attempt.request, segment, attempt.meta, attempt.processor_seconds)
        return attempt.result
    if isinstance(attempt, _Miss):
        return _load_and_publish(attempt, function, args, kwargs, begun)
    native_begun = time.perf_counter()
    try:
        with overlap.NativeCall(loader):
            return function(*args, **kwargs)
    finally:
        now = time.perf_counter()
        target = _target(loader, args, kwargs)
        _record(loader, target, "bypass", attempt.reason, now - begun, native_seconds=now - native_begun)


@passed_over
def generic(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`overmind.load`: any callable that returns what it loaded. A loader that is patched keeps its own rules."""
    underlying = getattr(fn, "__func__", fn)
    if hasattr(underlying, "__overmind_loader__"):
        return fn(*args, **kwargs)
    receiver = getattr(fn, "__self__", None)
    owner = receiver if isinstance(receiver, type) else None
    name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
    return call(Loader(name=name), fn, args, kwargs, owner)


def _guarded(step: Callable[..., Any], *args: Any) -> Any:
    try:
        return step(*args)
    except (key.Uncacheable, skeleton.Unsupported) as refusal:
        signals.pass_on(refusal)
        return _Bypass(str(refusal))
    except _core.OvermindError as error:
        if isinstance(error, _core.TimeoutError):
            store.give_up(error)  # not seconds again for each of the next loads
        return _Bypass(f"the store could not be used: {error}")
    except Exception as error:
        signals.pass_on(error)
        log.logger.debug("fault in a load, which goes native", exc_info=True)
        return _Bypass(f"a fault of Overmind's own ({type(error).__name__}: {error}); please report it")


def _attempt(
    loader: Loader, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: type | None
) -> _Hit | _Miss | _Bypass:
    request = key.make_request(loader, function, args, kwargs, owner)
    skipped = ambient.skipped_by_caller() if loader.changes_process else None
    if skipped is not None and not overlap.elsewhere():
        return _Bypass(f"it is called inside transformers' {skipped}()")
    client = store.client()
    reason = "not loaded before with these arguments"
    with waiting.Wait(request.target) as wait:
        tries = 0
        pause = 0.0
        while tries < _STALE_TRIES:
            found = client.lookup(request.key, lease=True, wait=pause)
            if isinstance(found, _core.Lease):
                return _Miss(request, found, reason)
            if isinstance(found, _core.Busy):
                why = wait.worth(found)
                if why is not None:
                    return _Bypass(why)
                pause = waiting.SLICE
                continue
            assert isinstance(found, _core.Segment)
            outcome = _use(request, found, function)
            if isinstance(outcome, _Narrowed):
                reason = outcome.reason
                continue
            if isinstance(outcome, _Hit):
                client.used(found.entry_id)
            if not isinstance(outcome, str):
                return outcome
            reason = outcome
            tries += 1
            _drop(client, found.entry_id)
    return _Bypass(reason)


def _use(
    request: key.Request, segment: _core.Segment, function: Callable[..., Any]
) -> _Hit | _Bypass | _Narrowed | str:
    """A hit, or why the load is native though there is an entry, or why another one may serve it, or, as text, why that
    entry is of no use any more."""
    meta = json.loads(segment.meta)
    stale = dependencies.changed(meta["dependencies"])
    if stale is not None:
        return stale
    slower = worth.note(meta)
    if slower is not None:
        return _Bypass(slower)
    libraries = foreign_code.state(meta["names"], function)
    if libraries.by_user is not None:
        return _Bypass(libraries.by_user)
    stale = libraries.difference(meta["libraries"])
    if stale is not None:
        if request.narrowed:
            return stale
        request.narrow(libraries.text())
        return _Narrowed(stale)
    try:
        parts = request.arguments.resolve(meta["substitutes"])
    except LookupError as error:
        return str(error)
    try:
        return _hit(request, segment, meta, parts)
    except _Unrestorable as failure:
        if request.key in _failed:  # what was made anew fails here, too: it may serve another process
            return _Bypass(str(failure))
        _failed.add(request.key)
        return str(failure)


def _hit(request: key.Request, segment: _core.Segment, meta: dict[str, Any], parts: list[Any]) -> _Hit:
    with collector.off():  # one that falls due would count as the hit's own time
        clock = worth.Clock()
        result = _restore(segment, meta, parts, request)
        seconds = clock.seconds()
    return _Hit(result, segment, request, meta, seconds)


def _restore(segment: _core.Segment, meta: dict[str, Any], parts: list[Any], request: key.Request) -> Any:
    if meta["borrowed"]:
        borrowing.attach(segment, meta["dependencies"], meta["borrowed"])
    held = torch_warnings.Held() if torch_warnings.concerns(meta["names"]) else None
    try:
        with held or contextlib.nullcontext():
            result = skeleton.restore(segment, parts)
    except (Warning, OSError, MemoryError, RecursionError):
        raise  # the entry is not to blame
    except Exception as error:
        signals.pass_on(error)
        log.logger.debug("entry %s can't be restored", segment.entry_id, exc_info=True)
        raise _Unrestorable(f"what was kept could not be restored ({_said(error)})") from error
    filled = request.call.filled
    if filled is not None:
        result, values = result
        filled.update(values)
    if held is None:
        replay.replay(meta["messages"])
    else:
        held.replay(meta["messages"], request.generic)
    return result


def _said(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _drop(client: _core.Client, entry_id: str) -> None:
    try:
        client.drop(entry_id)
    except _core.NotFoundError:
        log.logger.debug("entry %s was dropped by another process first", entry_id)


@passed_over
def _load_and_publish(
    miss: _Miss, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], begun: float
) -> Any:
    request = miss.request
    loader = request.call.loader
    try:
        recording = Recording(request)
        native_call = overlap.NativeCall(loader)
        # A function of the user's may count on the collector.
        garbage = contextlib.nullcontext() if request.generic else collector.young_only()
        native_begun = time.perf_counter()
        _local.recording = True
        try:
            with native_call, recording, garbage:
                result = function(*args, **kwargs)
        except BaseException as error:
            now = time.perf_counter()
            reason = f"the native load raised {type(error).__name__}"
            _record(loader, request.target, "bypass", reason, now - begun, native_seconds=now - native_begun)
            raise
        finally:
            _local.recording = False
        native = time.perf_counter() - native_begun
        refusal = native_call.reason or recording.refusal
        outcome = _Bypass(refusal) if refusal is not None else _guarded(_publish, miss, recording, result, native)
        seconds = time.perf_counter() - begun
        if isinstance(outcome, _Bypass):
            _record(loader, request.target, "bypass", outcome.reason, seconds, native_seconds=native)
        else:
            entry_id, nbytes = outcome
            _record(loader, request.target, "miss", miss.reason, seconds, nbytes, entry_id, native)
        return result
    finally:
        miss.lease.release()


def _publish(miss: _Miss, recording: Recording, result: Any, native: float) -> tuple[str, int] | _Bypass:
    request, loader = miss.request, miss.request.call.loader
    numbers, objects = request.arguments.substitutes()
    kept = result if request.call.filled is None else (result, request.call.set_by_load())
    file = os.fsdecode(request.call.arguments[loader.target]) if loader.archive else None
    snapshot = skeleton.take(kept, numbers, objects, file)
    if objects and substitution.shares(objects, snapshot.buffers):
        return _Bypass("the result is a view of an argument's own memory")
    names = sorted(snapshot.names)
    libraries = foreign_code.state(names, request.call.function)
    if libraries.by_user is not None:
        return _Bypass(libraries.by_user)
    depends = recording.dependencies + dependencies.of_classes({module for module, _ in snapshot.names})
    buffers, borrowed = borrowing.borrow(snapshot.buffers, depends)
    meta = {
        "dependencies": depends,
        "borrowed": borrowed,
        "names": names,
        "libraries": libraries.digests,
        "nbytes": snapshot.nbytes,
        "messages": recording.messages,
        "substitutes": request.arguments.paths(snapshot.used),
    }
    publication = store.client().publish(
        miss.lease,
        loader=loader.name,
        target=_shown(request.target),
        native_seconds=native,
        meta=json.dumps(meta, separators=(",", ":")).encode(),
        skeleton=snapshot.skeleton,
        tensors=snapshot.tensors,
        buffers=buffers,
        inline_limit=_INLINE_LIMIT,
    )
    store.track(publication)
    return publication.entry_id, snapshot.nbytes


def _shown(target: str) -> str:
    """As the manifest takes it: UTF-8 (a file name may hold any byte), at most 4,096 bytes."""
    return target.encode("utf-8", "replace")[:4096].decode("utf-8", "ignore")


def _target(loader: Loader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    value = kwargs.get(loader.target, args[0] if args else "")
    return str(value) if isinstance(value, (str, bytes)) or hasattr(value, "__fspath__") else type(value).__name__


def _record(
    loader: Loader,
    target: str,
    outcome: records.Outcome,
    reason: str,
    seconds: float,
    nbytes: int = 0,
    entry_id: str = "",
    native_seconds: float | None = None,
) -> None:
    record = LoadRecord(loader.name, target, outcome, reason, seconds, nbytes, entry_id, native_seconds)
    records.add(record)
    journal.append(record)
    log.logger.info("%s %s in %.3f s%s", outcome, target, seconds, f": {reason}" if reason else "")
