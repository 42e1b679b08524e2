# SPDX-License-Identifier: MIT
"""The engine `xeus`: Overmind's own kernel, as `python -m overmind.kernel -f FILE` runs it."""

from __future__ import annotations

import signal

from overmind.zygote import profile

_prepared = False


def prepare() -> None:
    """The shell, without sockets; nothing if something of the user's would have to run for it."""
    from overmind.kernel import app

    if app.configured() is None:
        _make_shell()


def outdated() -> str | None:
    """Whether the user has configured IPython since."""
    from overmind.kernel import app

    return app.configured() if _prepared else None


def _make_shell() -> None:
    global _prepared
    from overmind.kernel import app

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the kernel is there; see interrupts.py
    app.prepare([])
    _prepared = True


def serve(connection_file: str) -> None:
    """Runs the kernel until it is shut down."""
    from overmind.kernel import app

    if not _prepared:
        _make_shell()
    profile.kernel_is_made()
    app.IPKernelApp.instance().shell.events.register("post_run_cell", lambda _result: profile.look())
    raise SystemExit(app.serve(connection_file))
