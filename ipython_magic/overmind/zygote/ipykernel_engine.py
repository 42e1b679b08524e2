# SPDX-License-Identifier: MIT
"""The engine `ipykernel`: IPKernelApp as `python -m ipykernel_launcher -f FILE` runs it."""

from __future__ import annotations

import os
import sys

from overmind.zygote import profile


def prepare() -> None:
    """The imports. The application, its sockets, history and event loop are made in serve(), for they hold pids."""
    import ipykernel.kernelapp  # noqa: F401


def serve(connection_file: str) -> None:
    """Runs the kernel until it is shut down."""
    from ipykernel import kernelapp

    # A fork's parent is the zygote, so ipykernel's own watch over the server would end it at once or never; the
    # launcher, whose parent the server is, watches instead.
    parent = os.environ.pop("JPY_PARENT_PID", None) if profile.forked() else None
    sys.argv = [sys.argv[0], "-f", connection_file, *sys.argv[3:]]
    app = kernelapp.IPKernelApp.instance()
    app.initialize(sys.argv[1:])
    if parent is not None:
        os.environ["JPY_PARENT_PID"] = parent
    app.shell.events.register("post_run_cell", lambda _result: profile.look())
    app.start()
