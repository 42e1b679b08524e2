# SPDX-License-Identifier: MIT
"""When an interrupt is the user's code's. Between requests, and in the kernel's own code, it does nothing.

The handler between requests is a function, not SIG_IGN: programs that a background task starts would inherit that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def nothing(_signum: int, _frame: FrameType | None) -> None:
    """The handler between requests."""


def wake(loop: asyncio.AbstractEventLoop) -> None:
    """Lets every signal wake the loop: one that comes right before the loop goes to sleep would else be handled when
    it wakes up by itself, which may be never."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    loop.add_reader(reading, os.read, reading, 4096)


def disarm() -> None:
    """Interrupts do nothing from here on. One that comes while this runs is dropped, but at its very beginning."""
    while True:
        try:
            signal.signal(signal.SIGINT, nothing)
            return
        except KeyboardInterrupt:
            continue


def armed(function: Callable[[], T], after: Any = nothing) -> T:
    """Calls `function`. Within, an interrupt raises KeyboardInterrupt, as Python does by itself; afterwards it is
    `after`'s. Main thread only.

    No context manager, nor a call of `disarm`: where a function of Python's begins an interrupt can be raised, and it
    would leave interrupts armed."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return function()
    finally:
        while True:
            try:
                signal.signal(signal.SIGINT, after)
                break
            except KeyboardInterrupt:
                continue


def held(function: Callable[[], T]) -> T:
    """Calls `function`, which must be short. An interrupt that comes meanwhile comes after it: for what takes a lock
    or holds something that exists nowhere else. (`with condition:` is a function of Python's; an interrupt at the end
    of its __enter__ leaves the lock taken for good.)"""
    before = signal.getsignal(signal.SIGINT)
    if before is None or before is nothing or threading.current_thread() is not threading.main_thread():
        return function()
    came = False

    def remember(_signum: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    try:
        signal.signal(signal.SIGINT, remember)
        return function()
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def cancelling(task: asyncio.Task[Any], cell: Coroutine[Any, Any, Any]) -> Iterator[None]:
    """Within, an interrupt cancels `task`, which runs `cell`; but while the cell's own code runs it raises
    KeyboardInterrupt there, because a cell that computes never comes back to the loop to be cancelled. Nowhere else:
    asyncio, too, works in the task's name, and would lose its next step."""
    loop = task.get_loop()

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if cell.cr_running:  # type: ignore[attr-defined]
            signal.default_int_handler(signum, frame)
        loop.call_soon_threadsafe(task.cancel)

    try:
        signal.signal(signal.SIGINT, on_interrupt)
        yield
    finally:
        disarm()
