# SPDX-License-Identifier: MIT
"""A result through a segment and back, in one process and without a daemon."""

from __future__ import annotations

from typing import Any

from overmind import _core, skeleton


def segment_of(taken: skeleton.Snapshot, buffers: list[tuple[int, int]] | None = None) -> _core.Segment:
    """The segment that holds `taken`, or `buffers` in the place of its own."""
    return _core.make_segment(
        loader="l",
        target="t",
        meta=b"",
        skeleton=taken.skeleton,
        tensors=taken.tensors,
        buffers=taken.buffers if buffers is None else buffers,
    )


def copy_of(value: Any) -> Any:
    """What a hit would give for `value`."""
    return skeleton.restore(segment_of(skeleton.take(value, {}, [])), [])
