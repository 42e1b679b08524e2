# SPDX-License-Identifier: MIT
"""An entry that a hit does not serve faster than the load itself is given up for a note that says so.

Every entry knows how long its native load took; the hit's own time is that of its thread on the processor, which a busy
machine or a cold page cache does not stretch. The note stands in the entry's place, with its dependencies: once a
file changes, the next load is cached again, and so it is after `overmind drop`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from overmind import _core, key, store

_FLOOR = 0.05  # seconds: below, neither way is worth a thought, and clocks and warm-up are most of the difference
_NOTE = "slower"


class Clock:
    """Processor time of this thread; None if something was imported meanwhile, which the native load may have found."""

    def __init__(self) -> None:
        self._modules = len(sys.modules)
        self._begun = time.thread_time()

    def seconds(self) -> float | None:
        seconds = time.thread_time() - self._begun
        return seconds if len(sys.modules) == self._modules else None


def note(meta: dict[str, Any]) -> str | None:
    """Why this entry is no entry any more, or None."""
    return meta.get(_NOTE)


def judge(request: key.Request, segment: _core.Segment, meta: dict[str, Any], seconds: float | None) -> None:
    """After a hit that took `seconds` of processor time: replaces the entry by a note if the load itself is faster."""
    native = segment.native_seconds
    if seconds is None or seconds < max(native, _FLOOR):
        return
    client = store.client()
    client.drop(segment.entry_id)
    lease = client.lookup(request.key, lease=True)
    if not isinstance(lease, _core.Lease):
        return  # somebody else was faster
    reason = f"cached it was not faster: a hit took {seconds:.2f} s, the load itself {native:.2f} s"
    kept = {"dependencies": meta["dependencies"], _NOTE: reason}
    publication = client.publish(
        lease,
        loader=segment.loader,
        target=segment.target,
        native_seconds=native,
        meta=json.dumps(kept, separators=(",", ":")).encode(),
        skeleton=b"",
        tensors=b"",
        buffers=[],
    )
    store.track(publication)
