# SPDX-License-Identifier: MIT
"""Weights that stay in their file: what the native load only mapped, an entry does not copy.

See kernel_ext/borrowed.h for why, and for what is proved before a buffer is borrowed. Here they are tied to the
dependencies: only a file whose identity the entry checks at every hit can lend anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overmind import _core

_MIN_SIZE = 64 * 1024  # bytes; smaller ones are copied

Buffers = list[tuple[int, int]]


def borrow(buffers: Buffers, dependencies: Sequence[Sequence[Any]]) -> tuple[Buffers, list[list[int]]]:
    """What is left to copy, and [[buffer, dependency, offset, nbytes], ...] for the rest, empty in the former."""
    files = {(item[1], item[2]): number for number, item in enumerate(dependencies) if type(item[1]) is int}
    kept, borrowed = list(buffers), []
    for index, dev, ino, offset in _core.find_borrowable(buffers, _MIN_SIZE):
        number = files.get((dev, ino))
        if number is not None:
            address, nbytes = buffers[index]
            kept[index] = (address, 0)
            borrowed.append([index, number, offset, nbytes])
    return kept, borrowed


def attach(segment: _core.Segment, dependencies: Sequence[Sequence[Any]], borrowed: Sequence[Sequence[int]]) -> None:
    """Maps the files that lend to this entry. _core.OvermindError if one is not what it was."""
    numbers = sorted({item[1] for item in borrowed})
    places = {number: place for place, number in enumerate(numbers)}
    segment.attach(
        [tuple(dependencies[number][:6]) for number in numbers],
        [(buffer, places[number], offset, nbytes) for buffer, number, offset, nbytes in borrowed],
    )
