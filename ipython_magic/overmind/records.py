# SPDX-License-Identifier: MIT
"""What each load of this process came to: for `history()`, `%overmind why` and the totals."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["hit", "miss", "bypass"]


@dataclass(frozen=True)
class LoadRecord:
    """One load. Immutable."""

    loader: str
    """"transformers.PreTrainedModel.from_pretrained"."""
    target: str
    """What was asked for: a path or a repo id, as people read it."""
    outcome: Outcome
    reason: str
    """Why it was no hit; empty for a hit."""
    seconds: float
    """Wall time until the caller had the object."""
    nbytes: int = 0
    """Size of the object, pickled: what the entry holds and what it borrows from files; 0 for a bypass."""
    entry_id: str = ""
    """16 hex digits; empty for a bypass."""
    native_seconds: float | None = None
    """What the native load took: measured now (miss, bypass) or when the entry was made (hit)."""
    when: float = field(default_factory=time.time)
    """Seconds since the epoch, at the end of the load."""


_LIMIT = 1000  # records kept; one is about 0.5 kB

_lock = threading.Lock()
_history: deque[LoadRecord] = deque(maxlen=_LIMIT)
_counts: dict[str, int] = {"hit": 0, "miss": 0, "bypass": 0}
_saved = 0.0


def add(record: LoadRecord) -> None:
    """Thread-safe."""
    global _saved
    with _lock:
        _history.append(record)
        _counts[record.outcome] += 1
        if record.outcome == "hit" and record.native_seconds is not None:
            _saved += max(0.0, record.native_seconds - record.seconds)


def history() -> list[LoadRecord]:
    """The loads of this process, oldest first; the newest 1,000."""
    with _lock:
        return list(_history)


def totals() -> dict[str, float]:
    """Counts of this process since it started, and the seconds that its hits saved."""
    with _lock:
        loads = sum(_counts.values())
        return {
            "loads": loads,
            "hits": _counts["hit"],
            "misses": _counts["miss"],
            "bypasses": _counts["bypass"],
            "hit_rate": _counts["hit"] / loads if loads else 0.0,
            "seconds_saved": _saved,
        }
