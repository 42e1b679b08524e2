# SPDX-License-Identifier: MIT
"""When an interrupt is the user's code's. Between requests, and in the kernel's own code, it does nothing.

The handler between requests is a function, not SIG_IGN: programs that a background task starts would inherit that.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    pass


def wake(loop: asyncio.AbstractEventLoop) -> None:
    """Lets every signal wake the loop: one that comes right before the loop goes to sleep would else be handled when
    it wakes up by itself, which may be never."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    loop.add_reader(reading, os.read, reading, 4096)


def disarm() -> None:
    """Interrupts do nothing from here on. Never raises: one that comes while this runs is dropped."""
    while True:
        try:
            signal.signal(signal.SIGINT, _nothing)
            return
        except KeyboardInterrupt:
            continue


@contextmanager
def armed() -> Iterator[None]:
    """Within, an interrupt raises KeyboardInterrupt, as Python does by itself. Main thread only."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        disarm()


@contextmanager
def cancelling(task: asyncio.Task[Any]) -> Iterator[None]:
    """Within, an interrupt cancels `task`; but while the task itself runs, it raises KeyboardInterrupt there, because
    a cell that computes never comes back to the loop to be cancelled."""
    loop = task.get_loop()

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if asyncio.current_task(loop) is task:
            signal.default_int_handler(signum, frame)
        loop.call_soon_threadsafe(task.cancel)

    try:
        signal.signal(signal.SIGINT, on_interrupt)
        yield
    finally:
        disarm()
