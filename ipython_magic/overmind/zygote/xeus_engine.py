# SPDX-License-Identifier: MIT
"""The engine `xeus`: Overmind's own kernel, as `python -m overmind.kernel -f FILE` runs it."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from overmind.zygote import profile

_prepared = False


def prepare() -> None:
    """The shell, without sockets; nothing if something of the user's would have to run for it."""
    from overmind.kernel import app

    if app.configured() is None:
        _make_shell([])


def outdated() -> str | None:
    """Whether the user has configured IPython since."""
    from overmind.kernel import app

    return app.configured() if _prepared else None


def _make_shell(options: Sequence[str]) -> None:
    global _prepared
    from overmind.kernel import app

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the kernel is there; see interrupts.py
    app.prepare(list(options))
    _prepared = True


def serve(arguments: Sequence[str]) -> None:
    """Runs the kernel until it is shut down. REQUIRES: a shell that was made ahead is asked for without options."""
    from overmind.kernel import app

    made_ahead = _prepared
    if not made_ahead:
        _make_shell(arguments)
    profile.kernel_is_made()
    app.IPKernelApp.instance().shell.events.register("post_run_cell", lambda _result: profile.look())
    raise SystemExit(app.serve(arguments[1] if made_ahead else app.named_file()))
