# SPDX-License-Identifier: MIT
"""The engine `xeus`: Overmind's own kernel, as `python -m overmind.kernel -f FILE` runs it."""

from __future__ import annotations

import signal

from overmind.zygote import profile

_prepared = False


def prepare() -> None:
    """The shell, without sockets. Once in a process."""
    global _prepared
    from overmind.kernel import app

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the kernel is there; see interrupts.py
    app.prepare([])
    _prepared = True


def serve(connection_file: str) -> None:
    """Runs the kernel until it is shut down."""
    from overmind.kernel import app

    if not _prepared:
        prepare()
    profile.kernel_is_made()
    app.IPKernelApp.instance().shell.events.register("post_run_cell", lambda _result: profile.look())
    raise SystemExit(app.serve(connection_file))
