# SPDX-License-Identifier: MIT
"""This process's way to the daemon: one client, connected at first need, and the snapshots on their way."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from overmind import _core, log, records

_RETRY_AFTER = 30.0  # seconds before a store that could not be reached is tried again

_lock = threading.Lock()
_client: _core.Client | None = None
_warmed: tuple[_core.Client, str] | None = None  # connected ahead of need, and to which folder
_failure: _core.OvermindError | None = None
_failed_at = 0.0
_publications: list[_core.Publication] = []


def config() -> _core.Config:
    """The environment as it is now, with the daemon that belongs to this installation."""
    settings = _core.config()
    settings.daemon_path = str(Path(_core.__file__).with_name("overmindd"))
    return settings


def client() -> _core.Client:
    """The connected client. Starts the daemon if there is none.

    Raises _core.OvermindError. A failure is remembered for half a minute, so that a broken store costs one
    attempt and one warning line, not one per load.
    """
    global _client, _failure, _failed_at
    with _lock:
        if _client is not None:
            return _client
        if _failure is not None and time.monotonic() - _failed_at < _RETRY_AFTER:
            raise _failure
        try:
            candidate = _candidate()
            candidate.connect(start=True)
        except _core.OvermindError as error:
            _give_up(error)
            raise
        _client, _failure = candidate, None
        return candidate


def give_up(error: _core.OvermindError) -> None:
    """The daemon does not answer: loads are native for half a minute, then it is tried again. Thread-safe."""
    with _lock:
        _give_up(error)


def _give_up(error: _core.OvermindError) -> None:
    global _client, _failure, _failed_at
    if error is _failure:
        return  # a load that was told of it: the half minute began before
    _client, _failure, _failed_at = None, error, time.monotonic()
    log.warn_once(f"the store can't be used, loads are native: {error}. `overmind doctor` says what to do.")


def _candidate() -> _core.Client:
    global _warmed
    settings = config()
    warmed, _warmed = _warmed, None
    if warmed is not None and warmed[1] == settings.instance_dir:
        return warmed[0]
    return _core.Client(settings)


connects_ahead = True  # a zygote's imports must not leave a connection behind


def warm() -> None:
    """Connects if a daemon runs: 2 ms that the first load saves. Starts none, remembers no failure."""
    global _warmed
    with _lock:
        if not connects_ahead or _client is not None or _warmed is not None or _failure is not None:
            return
        settings = config()
        candidate = _core.Client(settings)
        try:
            candidate.connect(start=False)
        except _core.OvermindError:
            return
        _warmed = candidate, settings.instance_dir


def reset() -> None:
    """Forgets the client and a remembered failure: the next load reads the environment again."""
    global _client, _failure, _warmed
    with _lock:
        _client, _failure, _warmed = None, None, None


def track(publication: _core.Publication) -> None:
    """Remembers a snapshot until it is done. Thread-safe."""
    with _lock:
        _publications[:] = [p for p in _publications if p.wait(0.0) is None]
        _publications.append(publication)


def wait_published(timeout: float | None = None) -> bool:
    """Waits until every snapshot of this process is committed.

    `timeout` in seconds, None for no limit. True if all were committed, False if one failed or time ran out.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with _lock:
        waiting = list(_publications)
    committed = True
    for publication in waiting:
        outcome = None
        while outcome is None:
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            outcome = publication.wait(max(0.0, left))
            if outcome is None and deadline is not None and time.monotonic() >= deadline:
                return False
        if not outcome:
            committed = False
            log.logger.warning("a result was not kept: %s", publication.failure)
    with _lock:
        _publications[:] = [p for p in _publications if p not in waiting]
    return committed


def stats() -> dict[str, Any]:
    """Figures of this process under "process" and of the daemon under "store" (None while none can be reached)."""
    try:
        store: dict[str, Any] | None = dict(client().stats())
    except _core.OvermindError:
        store = None
    return {"process": records.totals(), "store": store}
