# SPDX-License-Identifier: MIT
"""From the command line of boot.py to a plain start or to the zygote."""

from __future__ import annotations

import sys
from collections.abc import Callable

import overmind
from overmind import _core, log


def main(words: list[str], at_end: list[Callable[[], None]]) -> None:
    """`plain MODE TARGET PROFILE READY_FD ARGUMENT...`, or
    `zygote SOCKET PROFILE LOCK_FD MODE TARGET [PID:FD]...`. Returns only by an exception: overmind.zygote.become.Leave
    for a program to run. `at_end`: called after all that atexit calls."""
    if words[0] == "plain":
        _plain(words[1], words[2], words[3], int(words[4]), words[5:])
    else:
        _zygote(words[1:], at_end)


def _plain(mode: str, target: str, profile_path: str, ready: int, arguments: list[str]) -> None:
    _enable()
    native = frozenset(sys.modules)
    from overmind.zygote import become, preload, profile

    if ready >= 0:
        ready = become.out_of_the_way(ready)
    preload.forget(native)
    become.new_main()
    become.describe(mode, target, arguments)
    learner = profile.Learner(profile_path, mode, target) if profile_path else None
    profile.begin(learner, ready=ready)
    become.leave(mode, target, arguments)


def _zygote(words: list[str], at_end: list[Callable[[], None]]) -> None:
    _enable()
    native = frozenset(sys.modules)
    from overmind.zygote import server

    server.run(words, native, at_end)


def _enable() -> None:
    """As a program's own first lines would; never fails a start."""
    try:
        overmind.enable()
    except _core.OvermindError as error:
        log.warn_once(f"loads are native: {error}")
