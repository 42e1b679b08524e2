# SPDX-License-Identifier: MIT
"""The engine `ipykernel`: IPKernelApp as `python -m ipykernel_launcher -f FILE` runs it."""

from __future__ import annotations

from collections.abc import Sequence

from overmind.zygote import profile


def prepare() -> None:
    """The imports. The application, its sockets, history and event loop are made in serve(), for they hold pids."""
    import ipykernel.kernelapp  # noqa: F401


def outdated() -> None:
    """Imports that change are the zygote's to see."""


def serve(arguments: Sequence[str]) -> None:
    """Runs the kernel until it is shut down."""
    from ipykernel import kernelapp

    # A fork's parent is the zygote: ipykernel's own watch over the server would end the kernel with the zygote. The
    # launcher, whose parent the server is, watches instead.
    watched = {"parent_handle": 1} if profile.forked() else {}  # 1 is nobody to watch
    app = kernelapp.IPKernelApp.instance(**watched)
    app.initialize(list(arguments))
    profile.kernel_is_made()
    app.shell.events.register("post_run_cell", lambda _result: profile.look())
    app.start()
