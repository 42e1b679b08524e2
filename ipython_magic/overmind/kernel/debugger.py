# SPDX-License-Identifier: MIT
"""The debugger: debugpy, over the Debug Adapter Protocol, as JupyterLab and VS Code use it.

What the protocol's messages mean is left to ipykernel's `Debugger`, as a library: frontends were written against it. It
gets a thread with an asyncio loop of its own and, for the code that it runs in the kernel, a client of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from overmind.kernel import cell_files

Event = dict[str, Any]


def available() -> bool:
    """Whether this environment has what it takes."""
    return all(importlib.util.find_spec(name) is not None for name in ("debugpy", "ipykernel", "jupyter_client"))


def leave_alone(thread: threading.Thread) -> None:
    """A breakpoint must not stop the threads that serve the debugger."""
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


class Debugging:
    """Answers debug_requests. One per kernel; `answer` and `close` on the control thread, or after it ended."""

    def __init__(self, connection: dict[str, Any], publish_event: Callable[[Event], None]) -> None:
        """`publish_event` is called on the debugger's thread."""
        self._connection = connection
        self._publish_event = publish_event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._debugger: Any = None
        self._sockets: list[Any] = []

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The content of the debug_reply; waits for debugpy."""
        if self._debugger is None and message["command"] == "debugInfo":
            return _not_started(message)  # frontends ask as soon as a kernel is there: no second of imports for that
        if self._loop is None:
            self._begin()
        assert self._loop is not None
        reply = asyncio.run_coroutine_threadsafe(self._debugger.process_request(message), self._loop).result()
        return reply or {}

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for socket in self._sockets:
            socket.close(linger=0)

    def _begin(self) -> None:
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="overmind debugger", daemon=True)
        leave_alone(self._thread)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._make_debugger(), loop).result()
        self._loop = loop

    async def _make_debugger(self) -> None:
        from ipykernel.debugger import Debugger
        from jupyter_client.session import Session

        zmq: Any = importlib.import_module("zmq")  # its stubs hide what it re-exports
        context = zmq.Context.instance()
        session = Session(
            key=self._connection["key"].encode(),
            signature_scheme=self._connection["signature_scheme"],
            username="debugger",
        )
        shell = context.socket(zmq.DEALER)
        between = ":" if self._connection["transport"] == "tcp" else "-"
        shell.connect(
            f"{self._connection['transport']}://{self._connection['ip']}{between}{self._connection['shell_port']}"
        )
        adapter = context.socket(zmq.STREAM)
        self._sockets = [shell, adapter]
        stream = importlib.import_module("zmq.eventloop.zmqstream").ZMQStream(adapter)
        modules = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
        log = logging.getLogger("overmind.debugger")
        self._debugger = Debugger(log, stream, self._publish_event, shell, session, modules)
        # The first frame says who sent it: the one adapter that there is.
        stream.on_recv(lambda frames: self._debugger.tcp_client.receive_dap_frame(frames[1].decode()))
        self._stops = asyncio.get_running_loop().create_task(self._tell_stops())

    async def _tell_stops(self) -> None:
        while True:
            await self._debugger.handle_stopped_event()


def _not_started(message: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "response",
        "request_seq": message["seq"],
        "success": True,
        "command": message["command"],
        "body": {
            "isStarted": False,
            "hashMethod": "Murmur2",
            "hashSeed": cell_files.HASH_SEED,
            "tmpFilePrefix": cell_files.prefix(),
            "tmpFileSuffix": cell_files.SUFFIX,
            "breakpoints": [],
            "stoppedThreads": [],
            "richRendering": True,
            "exceptionPaths": ["Python Exceptions"],
            "copyToGlobals": True,
        },
    }
