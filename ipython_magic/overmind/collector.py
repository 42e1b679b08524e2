# SPDX-License-Identifier: MIT
"""Python's garbage collector during a load.

A load makes 100,000 objects and more, almost all of which stay. The collector goes through the young ones again and
again, and then through every object of the process: in the first load of a diffusers pipeline that one full collection
takes 110 to 300 ms of 0.8 s, plainly loaded or not, and finds nothing. Sparing it pays for what recording a load costs.

Both ways end with gc.freeze() and gc.unfreeze(), which put all objects into the oldest generation without looking at
them (CPython 3.10-3.13), so that the collections that were spared are not made up for right after the load. Once
400,000 objects came there so, a load ends with a full collection instead: Python's own counts begin anew each time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from contextlib import AbstractContextManager

from overmind import _core

_young_only = _core.YoungOnly()
os.register_at_fork(after_in_child=_young_only.in_child)


def off() -> AbstractContextManager[None]:
    """No collection at all: for the milliseconds of a restore or of a take."""
    return _core.CollectorOff(not _some_are_frozen())


def young_only() -> AbstractContextManager[None]:
    """Only the youngest generation is collected, in the whole process, which frees what a load leaves behind in cycles
    as it goes on. For native loads, which may take minutes. Several at a time, on any threads: the last one out sets
    the thresholds that the first one found, unless somebody has set others meanwhile."""
    return contextlib.nullcontext() if _some_are_frozen() else _young_only


def _some_are_frozen() -> bool:
    """Whether gc.unfreeze() would undo what somebody did. A zygote froze all its objects: counting them takes 57 ms."""
    profile = sys.modules.get("overmind.zygote.profile")
    return (profile is not None and profile.forked()) or gc.get_freeze_count() > 0
