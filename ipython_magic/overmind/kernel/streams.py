# SPDX-License-Identifier: MIT
"""sys.stdout and sys.stderr of the kernel."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from typing import Any

from overmind import _kernel
from overmind.kernel.parents import Parents


class OutStream(io.TextIOBase):
    """Text that becomes stream messages. Thread-safe. In a forked child it goes to the descriptor, which the kernel
    captures, so that it appears all the same."""

    encoding = "UTF-8"
    errors = "replace"
    newlines = None

    def __init__(self, channels: _kernel.Channels, parents: Parents, number: int) -> None:
        """`number`: 0 is stdout, 1 is stderr."""
        self.name = ("stdout", "stderr")[number]
        self._channels = channels
        self._write = channels.write
        self._parents = parents
        self._number = number

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if not self._write(self._number, text, self._parents.raw()):
            self._write_to_descriptor(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self.closed:
            self._channels.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        """Where the descriptor led before it was captured, as in ipykernel."""
        original = self._channels.original_descriptor(self._number)
        if original < 0:
            raise io.UnsupportedOperation("fileno")
        return original

    def set_parent(self, parent: Any) -> None:
        """Part of ipykernel's interface; here parents follow tasks by themselves."""

    def _write_to_descriptor(self, text: str) -> None:
        rest = memoryview(text.encode("utf-8", "replace"))
        while rest:
            rest = rest[os.write(self._number + 1, rest) :]
