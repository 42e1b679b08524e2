# SPDX-License-Identifier: MIT
"""A request as kernel_ext/launcher/request.cc writes it. Bytes that don't fit are refused, never guessed."""

from __future__ import annotations

import os
from dataclasses import dataclass

_MOST = 64 << 20  # bytes; the system's own limit on arguments and environment is far below


class MalformedError(ValueError):
    """Not a request."""


@dataclass(frozen=True)
class Request:
    """One start: what the launcher was started with."""

    key: bytes
    mode: str
    target: str
    umask: int
    blocked: frozenset[int]
    ignored: frozenset[int]
    arguments: list[str]
    environment: list[bytes]  # NAME=VALUE, in order
    descriptors: list[int]  # the numbers that passed descriptors have in the launcher


def read(descriptor: int) -> Request:
    """Reads the memory file that came with a request. Raises MalformedError."""
    size = os.fstat(descriptor).st_size
    if size > _MOST:
        raise MalformedError(f"a request of {size} bytes")
    return parse(os.pread(descriptor, size, 0))


def parse(data: bytes) -> Request:
    """Raises MalformedError."""
    lists, at = [], 0
    for _ in range(4):
        found, at = _list(data, at)
        lists.append(found)
    head, arguments, environment, numbers = lists
    if at != len(data) or len(head) != 6:
        raise MalformedError("a request of another version")
    try:
        return Request(
            key=head[0],
            mode=os.fsdecode(head[1]),
            target=os.fsdecode(head[2]),
            umask=int(head[3]),
            blocked=_signals(int(head[4])),
            ignored=_signals(int(head[5])),
            arguments=[os.fsdecode(word) for word in arguments],
            environment=environment,
            descriptors=[int(number) for number in numbers],
        )
    except ValueError as error:
        raise MalformedError(str(error)) from None


def _list(data: bytes, at: int) -> tuple[list[bytes], int]:
    count, at = _number(data, at)
    found = []
    for _ in range(count):
        size, at = _number(data, at)
        if size > len(data) - at:
            raise MalformedError("a request cut short")
        found.append(data[at : at + size])
        at += size
    return found, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    if at + 4 > len(data):
        raise MalformedError("a request cut short")
    return int.from_bytes(data[at : at + 4], "little"), at + 4


def _signals(bits: int) -> frozenset[int]:
    return frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1)
