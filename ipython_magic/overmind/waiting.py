# SPDX-License-Identifier: MIT
"""Waiting for another process that makes the same load: how long it is worth it, and what the user sees."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from overmind import _core

SLICE = 0.25  # seconds of one question to the daemon; Ctrl-C is heard between two
_LOADING_LIMIT = 300.0  # a holder that is stopped, not dead, must not stop us for ever
_STALL_LIMIT = 10.0  # seconds without a byte written
_SHOW_AFTER = 0.5  # seconds before a progress bar appears


class Wait:
    """One wait. `worth(busy)` says whether to go on; the bar is drawn as a side effect. Not thread-safe."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._begun = time.monotonic()
        self._progress: Any = None
        self._task: Any = None
        self._written = -1
        self._grew = self._begun

    def __enter__(self) -> Wait:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def worth(self, busy: _core.Busy) -> str | None:
        """None: wait on. Otherwise the reason to load natively now.

        While the holder loads, waiting is the shorter way: its load began before ours would. Once it publishes,
        what is left to write is weighed against a native load, which took the holder `native_seconds`.
        """
        now = time.monotonic()
        if busy.written != self._written:
            self._written, self._grew = busy.written, now
        self._show(busy, now)
        if not busy.publishing:
            if now - self._begun > _LOADING_LIMIT:
                return f"another process has been loading it for {busy.elapsed:.0f} s"
            return None
        if now - self._grew > _STALL_LIMIT:
            return f"another process is publishing it and has not moved for {_STALL_LIMIT:.0f} s"
        if busy.bytes_per_second > 0:
            left = (busy.total - busy.written) / busy.bytes_per_second
            if left > busy.native_seconds:
                return f"another process is publishing it ({left:.1f} s to go); a native load is sooner"
        return None

    def _show(self, busy: _core.Busy, now: float) -> None:
        if now - self._begun < _SHOW_AFTER:
            return
        if self._progress is None:
            from rich import console, progress

            place = console.Console()
            shown = place.is_terminal or place.is_jupyter  # elsewhere it would add a line to the program's own output
            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(binary_units=True),
                console=place,
                transient=True,
                disable=not shown,
            )
            self._task = self._progress.add_task("", total=None)
            self._progress.start()
        doing = "publishing" if busy.publishing else "loading"
        self._progress.update(
            self._task,
            description=f"overmind: another process is {doing} {self._target}",
            completed=busy.written,
            total=busy.total if busy.publishing else None,
        )
