# SPDX-License-Identifier: MIT
"""The kernel: takes requests from the channels, answers each exactly once.

Threads: everything here runs on the main thread, in an asyncio loop, but for `_on_control` and what it calls, which
runs on the control thread, and `publish`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from overmind import _kernel
from overmind.kernel import children, comms, debugger, interrupts, requests
from overmind.kernel.execution import Executor, error_content
from overmind.kernel.packing import pack
from overmind.kernel.parents import Incoming, Parents
from overmind.kernel.shell import ZMQInteractiveShell, flush_streams
from overmind.kernel.streams import OutStream

_COMM_TYPES = ("comm_open", "comm_msg", "comm_close")


class Kernel:
    """What `get_ipython().kernel` is. One per process."""

    def __init__(self, shell: ZMQInteractiveShell, connection: dict[str, Any], connection_file: Path) -> None:
        """Binds the sockets; ValueError if they can't be. Nothing is answered before `run`."""
        self.shell = shell
        self.connection_file = connection_file
        self.channels = _kernel.Channels(connection, _username())
        self.ident = self.channels.session
        self.parents = Parents()
        self.comm_manager = comms.install(self)
        self.loop = asyncio.new_event_loop()
        self._control_request: Incoming | None = None
        self._control_thread: int | None = None
        self._queue: deque[Incoming] = deque()
        self._arrived = asyncio.Event()
        self._current: Incoming | None = None
        self._stopping = False
        self._executor = Executor(self)
        self._debugging = debugger.Debugging({**connection, **self.channels.ports}, self._publish_debug_event)

    # What user code may reach.

    def publish(
        self,
        msg_type: str,
        content: dict[str, Any],
        parent: Incoming | None = None,
        *,
        metadata: dict[str, Any] | None = None,
        buffers: Iterable[Any] | None = None,
        topic: str = "",
    ) -> None:
        """Sends on iopub, for the request that the caller works for. ValueError or TypeError: not to be had as JSON."""
        request = parent or self._request()
        raw = None if request is None else request.raw
        self.channels.publish(msg_type, pack(content), raw, pack(metadata or {}), buffers, topic)

    def get_parent(self, channel: str | None = None) -> dict[str, Any]:
        """The request that is being answered (on "shell" or "control"), as a message; {} before the first."""
        request = self._control_request if channel == "control" else self._request()
        return {} if request is None else request.message

    def send_response(self, _stream: Any, msg_type: str, content: dict[str, Any], **options: Any) -> None:
        """As in ipykernel, for code that publishes by itself."""
        self.publish(msg_type, content, metadata=options.get("metadata"), buffers=options.get("buffers"))

    @property
    def execution_count(self) -> int:
        return int(self.shell.execution_count)

    def stop_soon(self) -> None:
        """Ends `run` once the request in hand is answered. Any thread."""
        self.loop.call_soon_threadsafe(self._stop)

    # Life.

    def open(self) -> None:
        """Streams, heartbeat, control. The shell is attached, so that start-up code can already print and display."""
        asyncio.set_event_loop(self.loop)
        interrupts.disarm()
        self.channels.capture_descriptors()
        sys.stdout = OutStream(self.channels, self.parents, 0)
        sys.stderr = OutStream(self.channels, self.parents, 1)
        self.shell.attach(self)
        self.channels.start(self._on_control, int(os.environ.get("JPY_PARENT_PID") or 0))

    def run(self) -> None:
        """Answers requests until a shutdown_request, `exit`, or stop_soon()."""
        self.channels.status("starting")
        self.loop.add_reader(self.channels.shell_fd, self._receive)
        interrupts.wake(self.loop)
        self._begin_serving()
        while not self._stopping:
            try:
                self.loop.run_forever()
            except BaseException as error:  # KeyboardInterrupt or SystemExit in a task or callback of the user's
                _complain(error)

    def _begin_serving(self, _ended: asyncio.Task[None] | None = None) -> None:
        """Again when the user's code cancelled the task, or an interrupt hit it."""
        if not self._stopping:
            self._serving = self.loop.create_task(self._serve())
            self._serving.add_done_callback(self._begin_serving)

    def close(self) -> None:
        """Gives the process's own streams back and lets nothing call Python any more. Idempotent."""
        flush_streams()
        self.channels.stop_control()
        self._debugging.close()
        self.channels.release_descriptors()
        self.channels.flush()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def _stop(self) -> None:
        self._stopping = True
        self._arrived.set()
        if self._current is None or self._current.msg_type != "execute_request":
            self.loop.stop()

    # The shell channel.

    def _receive(self) -> None:
        """Takes everything from the socket. A comm message that comes while a cell awaits is handled at once: the cell
        may be waiting for it."""
        interrupts.held(self._take_all)  # the user's code may run the loop, as with nest_asyncio

    def _take_all(self) -> None:
        while (raw := self.channels.receive()) is not None:
            try:
                request = Incoming(raw)
            except ValueError as error:
                _drop(error)
                continue
            if self._current is not None and request.msg_type in _COMM_TYPES:
                self.loop.create_task(self._handle_meanwhile(request))
            else:
                self._queue.append(request)
                self._arrived.set()

    async def _serve(self) -> None:
        if self._current is not None:
            self._finish(self._current)  # the task before this was shot in the middle of a request
        while not self._stopping:
            self._arrived.clear()
            self._receive()
            if self._queue:
                self._current = self._queue.popleft()
                await self._handle(self._current)
            else:
                await self._arrived.wait()
        self.loop.stop()

    async def _handle(self, request: Incoming) -> None:
        failure: BaseException | None = None
        try:
            self.parents.set(request)
            self.channels.set_parent(request.raw)
            self.channels.status("busy", request.raw)
            await self._answer(request)
        except BaseException as error:
            failure = error
            interrupts.disarm()
            _complain(error)
        self._finish(request, failure)

    def _finish(self, request: Incoming, failure: BaseException | None = None) -> None:
        if request.msg_type.endswith("_request") and not request.raw.replied:
            problem = failure or RuntimeError(f"{request.msg_type} could not be answered")
            content = error_content(problem, traceback.format_exception(problem))
            if request.msg_type == "execute_request":
                content["execution_count"] = self.shell.execution_count
                self.publish("error", {key: content[key] for key in ("ename", "evalue", "traceback")}, request)
            self.reply(request, content)
        self._flush()
        self.channels.status("idle", request.raw)
        self._current = None

    async def _handle_meanwhile(self, request: Incoming) -> None:
        before = self.parents.get()
        self.parents.set(request)
        try:
            # Interrupts are the awaiting cell's again when this is done.
            self._handle_comm(request, signal.getsignal(signal.SIGINT) or interrupts.nothing)
        finally:
            if before is not None:
                self.parents.set(before)

    async def _answer(self, request: Incoming) -> None:
        if request.msg_type == "execute_request":
            await self._execute(request)
        elif request.msg_type in _COMM_TYPES:
            self._handle_comm(request)
        else:
            self._respond(request, interrupts.armed(lambda: self._content_for(request)))

    def _handle_comm(self, request: Incoming, handler_after: Any = interrupts.nothing) -> None:
        handle = getattr(self.comm_manager, request.msg_type)
        interrupts.armed(lambda: handle(None, None, request.message), handler_after)

    def _respond(self, request: Incoming, content: dict[str, Any] | None) -> None:
        if content is None:
            return
        self.reply(request, content)
        if request.msg_type == "shutdown_request":
            self._shut_down(request, content)

    async def _execute(self, request: Incoming) -> None:
        if request.aborted:
            metadata = {"status": "aborted", "dependencies_met": True, "engine": self.ident}
            self.reply(request, {"status": "aborted"}, pack(metadata))
            return
        content, metadata_packed = await self._executor.execute(request)
        self._flush()
        stops = content["status"] == "error" and request.content.get("stop_on_error", True)
        if stops and not request.content.get("silent", False):
            # Before the reply: what is sent in answer to it must not be aborted.
            self._receive()
            for waiting in self._queue:
                waiting.aborted = waiting.msg_type == "execute_request"
        self.reply(request, content, metadata_packed)

    def reply(self, request: Incoming, content: dict[str, Any], metadata: bytes = b"{}") -> None:
        """Answers `request`, if it was not answered yet; on the thread of its channel."""
        try:
            packed = pack(content)
        except (TypeError, ValueError) as error:
            packed = pack(error_content(error, []))
        reply_type = request.msg_type.removesuffix("_request") + "_reply"
        self.channels.reply(request.raw, reply_type, packed, metadata)

    def _content_for(self, request: Incoming) -> dict[str, Any] | None:
        """What the reply says; None for what is no request."""
        content = request.content
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "kernel_info_request": lambda: requests.kernel_info(self.shell, self._features()),
            "complete_request": lambda: requests.complete(self.shell, content),
            "inspect_request": lambda: requests.inspect(self.shell, content),
            "history_request": lambda: requests.history(self.shell, content),
            "is_complete_request": lambda: requests.is_complete(self.shell, content),
            "comm_info_request": lambda: comms.comm_info(self.comm_manager, content.get("target_name")),
            "connect_request": lambda: {**self.channels.ports, "status": "ok"},
            "shutdown_request": lambda: {"status": "ok", "restart": content.get("restart", False)},
            "usage_request": requests.usage,
            "debug_request": lambda: self._debugging.answer(content),
        }
        answer = answers.get(request.msg_type)
        if answer is not None:
            return answer()
        if request.msg_type.endswith("_request"):
            raise ValueError(f"this kernel does not know {request.msg_type}")
        return None

    def _features(self) -> list[str]:
        return ["debugger"] if debugger.available() else []

    # The control channel, on its own thread.

    def _on_control(self, raw: _kernel.Request) -> None:
        if self._control_thread is None:
            self._control_thread = threading.get_ident()
            debugger.leave_alone(threading.current_thread())
        try:
            request = Incoming(raw)
        except ValueError as error:
            _drop(error)
            return
        self._control_request = request
        self.channels.status("busy", raw)
        try:
            self._respond(request, self._content_for(request))
        except BaseException as error:
            _complain(error)
            self.reply(request, error_content(error, traceback.format_exception(error)))
        self.channels.status("idle", raw)

    def _shut_down(self, request: Incoming, content: dict[str, Any]) -> None:
        children.terminate()
        self.publish("shutdown_reply", content, request, topic="shutdown")
        self.loop.call_soon_threadsafe(self._stop_now)

    def _stop_now(self) -> None:
        self._stopping = True
        self.loop.stop()

    def _publish_debug_event(self, event: debugger.Event) -> None:
        self.publish("debug_event", event, self._control_request)

    def _request(self) -> Incoming | None:
        if threading.get_ident() == self._control_thread:
            return self._control_request
        return self.parents.get()

    def _flush(self) -> None:
        try:
            flush_streams()
        except Exception as error:  # the user may have put anything in the place of sys.stdout
            _complain(error)
        self.channels.flush()


def _username() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in containers
        return "username"


def _drop(error: ValueError) -> None:
    with contextlib.suppress(Exception):  # the user may have closed it
        print(f"overmind kernel: dropped {error}", file=sys.__stderr__)


def _complain(error: BaseException) -> None:
    """A fault that has no cell to appear under. Never raises."""
    with contextlib.suppress(Exception):
        traceback.print_exception(error, file=sys.__stderr__)
