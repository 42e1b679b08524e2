# SPDX-License-Identifier: MIT
"""What %overmind and the `overmind` command do: plain functions that return JSON-able values. Neither prints here.

Raises _core.OvermindError for what the store answers, CommandError for what the user got wrong.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from overmind import _core, records


class CommandError(Exception):
    """A request that can't be carried out as given; its text says why."""


def client(start: bool = False) -> _core.Client:
    """A connection of its own. Without `start`, _core.UnavailableError if no daemon runs."""
    from overmind import store

    connection = _core.Client(store.config())
    connection.connect(start=start)
    return connection


def start(idle_exit: float | None = None) -> dict[str, Any]:
    """Starts the daemon if none runs. `idle_exit`: seconds without a client after which a daemon started now ends."""
    from overmind import store

    if idle_exit is not None and not idle_exit >= 0:  # NaN, too, with which the daemon would not start
        raise CommandError(f"--idle-exit takes 0 or more seconds, not {idle_exit}")
    running = status()
    if running["running"]:
        if idle_exit is not None:
            raise CommandError("a daemon runs already; --idle-exit is for one that is started now. Stop it first.")
        return running
    settings = store.config()
    if idle_exit is not None:
        settings.idle_exit_seconds = idle_exit
    _core.Client(settings).connect(start=True)
    return status()


def stop() -> dict[str, Any]:
    """Ends the daemon and the zygotes. Kernels and scripts go on, and what is loaded in them stays valid.

    `stopped` (whether a daemon ran), `daemon_pid`, `entries` that were given up, `zygotes` that were ended."""
    from overmind.zygote import stop

    before = status()
    if before["running"] or "error" in before:
        client().stop()
    try:
        ended = stop.end_all(before["folder"])
    except TimeoutError as error:
        raise _core.TimeoutError(str(error)) from None
    return {
        "stopped": bool(before["running"]),
        "daemon_pid": before.get("daemon_pid"),
        "entries": before.get("entries", 0),
        "zygotes": ended,
    }


def status() -> dict[str, Any]:
    """Whether a daemon runs, and where, and the zygotes. Starts none.

    If none runs, `reason`, and `error`, too, where none could: the runtime folder is a file, say."""
    settings = _core.config()
    found: dict[str, Any] = {
        "running": False,
        "disabled": settings.disabled,
        "client_version": _core.__version__,
        "folder": settings.instance_dir,
        "log": settings.log_path,
        "zygotes": zygotes(),
    }
    try:
        figures = client().stats()
    except _core.UnavailableError as error:
        return {**found, "reason": str(error)}
    except _core.OvermindError as error:
        return {**found, "reason": str(error), "error": str(error)}
    kept = ("version", "daemon_pid", "daemon_rss", "uptime_seconds", "budget", "used", "entries")
    return {**found, "running": True, **{name: figures[name] for name in kept}}  # type: ignore[literal-required]


def entries() -> list[_core.EntryInfo]:
    """All entries, the one used last first. None runs: none are there."""
    try:
        found = client().list()
    except _core.UnavailableError:
        return []
    return sorted(found, key=lambda entry: entry["last_used"], reverse=True)


def stats(here: bool = True) -> dict[str, Any]:
    """`store` (None: no daemon), `entries`, `zygotes`, `plain_start` (the last one; None: none yet), and with `here`
    this process's own figures under `process`."""
    from overmind.zygote import census

    try:
        connection = client()
        figures: dict[str, Any] | None = dict(connection.stats())
        rows = sorted(connection.list(), key=lambda entry: entry["last_used"], reverse=True)
    except _core.UnavailableError:
        figures, rows = None, []
    if figures is not None:
        asked = figures["hits"] + figures["misses"]
        figures["hit_rate"] = figures["hits"] / asked if asked else 0.0
    found: dict[str, Any] = {
        "store": figures,
        "entries": rows,
        "zygotes": zygotes(),
        "plain_start": census.last_plain_start(),
    }
    if here:
        found["process"] = records.totals()
    return found


def zygotes() -> list[dict[str, Any]]:
    """The processes that wait with their imports done, the one used last first."""
    from overmind.zygote import census

    rows = census.read(_core.config().instance_dir)
    return sorted(rows, key=lambda row: float(row["last_used"]), reverse=True)


def why(count: int, here: bool = True) -> list[dict[str, Any]]:
    """The last `count` loads, newest first: of this process, or (`here=False`) of all of this user's."""
    if count < 1:
        raise CommandError("N must be 1 or more")
    if here:
        return [asdict(record) for record in records.history()[: -count - 1 : -1]]
    from overmind import journal

    return list(journal.read()[: -count - 1 : -1])


def resolve(text: str) -> str:
    """The full id of the entry that `text` names: an id, or the beginning of exactly one."""
    ids = [entry["id"] for entry in entries()]
    found = [text] if text in ids else [name for name in ids if text and name.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{text!r} is the beginning of {len(found)} ids; give more of it")
    raise CommandError(f"no entry {text!r}; `overmind list` shows them")


def drop(ids: list[str]) -> list[str]:
    """Drops entries; returns their ids. Live mappings stay valid in their kernels."""
    full = list(dict.fromkeys(resolve(text) for text in ids))
    connection = client()
    for entry_id in full:
        connection.drop(entry_id)
    return full


def drop_all() -> int:
    """Drops every entry; returns how many there were."""
    try:
        return client().drop_all()
    except _core.UnavailableError:
        return 0


def drop_stale() -> dict[str, str]:
    """Drops the entries whose files have changed: id -> what changed."""
    from overmind import dependencies

    dropped = {}
    rows = entries()
    connection = client() if rows else None
    for entry in rows:
        assert connection is not None
        try:
            meta = json.loads(connection.open(entry["id"]).meta)
            reason = dependencies.changed(meta["dependencies"])
            if reason is None:
                continue
            connection.drop(entry["id"])
        except _core.NotFoundError:
            continue  # dropped by somebody else meanwhile
        dropped[entry["id"]] = reason
    return dropped


def pin(text: str, pinned: bool) -> str:
    """Keeps an entry from being evicted, or lets go of it; returns its id."""
    entry_id = resolve(text)
    client().pin(entry_id, pinned)
    return entry_id
