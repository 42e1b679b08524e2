# SPDX-License-Identifier: MIT
"""A store of one's own, for programs (benchmarks, demo) that must neither use nor disturb the user's."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import stop_daemon


@contextlib.contextmanager
def private_store() -> Iterator[dict[str, str]]:
    """The environment for processes that use a store in a new runtime folder.

    The daemon and the zygotes that they started are ended, by their pids, with the block. OVERMIND_BUDGET is passed on.
    """
    # Short and in /tmp: the path of a socket has 107 characters at most.
    runtime = Path(tempfile.mkdtemp(prefix="ov-", dir="/tmp"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OVERMIND_")}
    if budget := os.environ.get("OVERMIND_BUDGET"):
        environment["OVERMIND_BUDGET"] = budget
    environment["OVERMIND_RUNTIME_DIR"] = str(runtime)
    try:
        yield environment
    finally:
        stop_daemon(runtime)
        shutil.rmtree(runtime, ignore_errors=True)


def connect(runtime: Path, *, start: bool) -> Any:
    """A client of the store in `runtime`. Raises overmind._core.OvermindError."""
    from overmind import _core, store

    settings = store.config()
    settings.runtime_dir = str(runtime)
    client = _core.Client(settings)
    client.connect(start=start)
    return client


def snapshots() -> set[int]:
    """Processes that write a snapshot now, whoever's: they end by themselves."""
    import psutil

    return {process.pid for process in psutil.process_iter(["name"]) if "overmind-snap" in (process.info["name"] or "")}
