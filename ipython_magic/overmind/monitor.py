# SPDX-License-Identifier: MIT
"""Events of the store as they happen, from the daemon's ZeroMQ bus."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from typing import Any

from overmind import _core

_SLICE = 0.25  # seconds of one wait: Ctrl-C is heard, and a daemon that ended is noticed, between two


def events(seconds: float | None = None) -> Iterator[dict[str, Any]]:
    """Yields {"event": name, "when": seconds since the epoch, ...} until `seconds` are over or the daemon ends.

    The first item is {"event": "watching", ...}, once the subscription is sent. Events are lost, not queued, for a
    watcher that is too slow.
    Raises _core.UnavailableError if no daemon runs, ImportError without pyzmq.
    """
    zmq: Any = importlib.import_module("zmq")

    from overmind import commands

    connection = commands.client()
    deadline = None if seconds is None else time.monotonic() + seconds
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        watcher = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.subscribe(b"")
        socket.connect(f"ipc://{_core.config().events_path}")
        watcher.poll(2000)
        socket.disable_monitor()
        yield {"event": "watching", "when": time.time()}
        yield from _receive(socket, connection, deadline)
    finally:
        context.destroy(linger=0)


def _receive(socket: Any, connection: _core.Client, deadline: float | None) -> Iterator[dict[str, Any]]:
    quiet = 0.0
    while deadline is None or time.monotonic() < deadline:
        left = _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))
        if socket.poll(int(left * 1000) + 1):
            yield _parse(socket.recv_multipart())
            quiet = 0.0
            continue
        quiet += left
        if quiet > 2.0 and not _alive(connection):
            return
        quiet = 0.0 if quiet > 2.0 else quiet


def _alive(connection: _core.Client) -> bool:
    try:
        connection.connect(start=False)
        connection.stats()
    except _core.OvermindError:
        return False
    return True


def _parse(frames: list[bytes]) -> dict[str, Any]:
    name = frames[0].decode("utf-8", "replace")
    try:
        fields = json.loads(frames[1])
    except (IndexError, ValueError):
        fields = {}
    return {"event": name, "when": time.time(), **(fields if isinstance(fields, dict) else {})}
