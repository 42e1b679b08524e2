# SPDX-License-Identifier: MIT
"""A kernel as VS Code's Jupyter extension runs it without a Jupyter server ("raw"): no group of its own, five ports of
the extension's choice, signals to processes, no shutdown_request. It was read from the source of July 2026."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import zmq
from conftest import wait_for
from jupyter_client.session import Session

SECONDS = 60.0
CHANNELS = ("hb", "control", "shell", "stdin", "iopub")

Message = dict[str, Any]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class RawKernel:
    """One process and the sockets to it; a restart is another RawKernel. Use it in a `with`."""

    def __init__(self, argv: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        connection: Message = {f"{name}_port": port for name, port in zip(CHANNELS, free_ports(5), strict=True)}
        connection |= {"version": 1, "signature_scheme": "hmac-sha256", "ip": "127.0.0.1", "transport": "tcp"}
        connection |= {"key": str(uuid.uuid4()), "kernel_name": "overmind"}
        self.connection = connection
        self.file = folder / f"kernel-v3{uuid.uuid4().hex}.json"
        self.file.write_text(json.dumps(connection))
        # Node's spawn: pipes, and the group of the parent.
        self.process = subprocess.Popen(
            [word.replace("{connection_file}", str(self.file)) for word in argv],
            cwd=folder,
            env={**env, "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._context = zmq.Context()
        self._session = Session(key=connection["key"].encode(), username=str(uuid.uuid4()))
        identity = str(uuid.uuid4()).encode()  # one for the three
        self._sockets = {
            name: self._connect(name, kind, identity)
            for name, kind in (
                ("iopub", zmq.SUB),
                ("shell", zmq.DEALER),
                ("control", zmq.DEALER),
                ("stdin", zmq.DEALER),
            )
        }
        self._seen: list[tuple[str, Message]] = []  # all that came, and on which channel

    def _connect(self, name: str, kind: int, identity: bytes) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        if kind == zmq.SUB:
            made.subscribe(b"")
        else:
            made.setsockopt(zmq.IDENTITY, identity)
        made.connect(f"tcp://127.0.0.1:{self.connection[f'{name}_port']}")
        return made

    def __enter__(self) -> RawKernel:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.dispose()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=20)

    def dispose(self) -> None:
        """How VS Code ends a kernel, also for a restart: SIGTERM for every process below, then for the process itself.
        Nobody waits for it. Idempotent."""
        if self._context.closed:
            return
        self._context.destroy(0)
        for pid in (*self._below(), self.process.pid):
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        self.file.unlink(missing_ok=True)

    def interrupt(self) -> None:
        """SIGINT for every process below, then for the process itself; never for a group."""
        for pid in (*self._below(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _below(self) -> list[int]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]
        return []

    def start(self) -> Message:
        """Until VS Code calls it ready; the content of kernel_info_reply."""
        for name in ("shell", "iopub"):  # a TCP connection that says nothing
            port = self.connection[f"{name}_port"]
            wait_for(lambda port=port: _is_used(port), SECONDS, f"{name} listens")  # type: ignore[misc]
        info: list[Message] = []

        def ready() -> bool:
            for channel in ("control", "shell"):
                self.send(channel, "kernel_info_request", {})
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline and not (info and self._of("iopub")):
                self._poll(deadline)
                info.extend(one["content"] for one in self._of("control") + self._of("shell"))
            return bool(info and self._of("iopub"))

        wait_for(ready, SECONDS, "kernel_info_reply, and something on iopub")
        return info[0]

    def send(self, channel: str, msg_type: str, content: Message) -> str:
        """The request's id."""
        message = self._session.msg(msg_type, content)
        self._session.send(self._sockets[channel], message)
        return str(message["header"]["msg_id"])

    def answer(self, prompt: Message, value: str) -> None:
        self._session.send(self._sockets["stdin"], "input_reply", {"value": value}, parent=prompt)

    def _poll(self, deadline: float) -> None:
        """Takes what is there, or comes first before the deadline."""
        poller = zmq.Poller()
        names = {each: name for name, each in self._sockets.items()}
        for each in names:
            poller.register(each, zmq.POLLIN)
        for each, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = self._session.recv(each)[1]
            assert message is not None
            self._seen.append((names[each], message))

    def _of(self, channel: str, request: str | None = None) -> list[Message]:
        """What came on a channel (for a request)."""
        return [
            message
            for name, message in self._seen
            if name == channel and request in (None, message["parent_header"].get("msg_id"))
        ]

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, (
                f"not within {SECONDS} s: {what}; kernel: {self.process.poll()}, last: {self._seen[-5:]}"
            )
            self._poll(deadline)

    def wait(self, channel: str, condition: Callable[[Message], bool], what: str) -> Message:
        """The first message on a channel, of those that come from now on, for which it holds."""
        since = len(self._of(channel))
        found: list[Message] = []

        def came() -> bool:
            found[:] = [message for message in self._of(channel)[since:] if condition(message)]
            return bool(found)

        self._until(came, what)
        return found[0]

    def request(self, channel: str, msg_type: str, content: Message) -> Message:
        """The content of the reply."""
        sent = self.send(channel, msg_type, content)
        self._until(lambda: bool(self._of(channel, sent)), msg_type)
        return self._of(channel, sent)[0]["content"]  # type: ignore[no-any-return]

    def execute(self, code: str, **options: Any) -> tuple[Message, list[Message]]:
        """Sends a cell as the editor does, and waits as it does, for the reply and the idle status: the content of the
        reply, and the outputs."""
        return self.finish(self.begin(code, **options))

    def begin(self, code: str, **options: Any) -> str:
        content = {"code": code, "silent": False, "stop_on_error": False, "allow_stdin": True, "store_history": True}
        return self.send("shell", "execute_request", {**content, "user_expressions": {}, **options})

    def finish(self, sent: str) -> tuple[Message, list[Message]]:
        def done() -> bool:
            return bool(self._of("shell", sent)) and _is_idle(self._of("iopub", sent)[-1:])

        self._until(done, "the cell's reply and idle")
        (reply,) = self._of("shell", sent)
        outputs = [each for each in self._of("iopub", sent) if each["msg_type"] not in ("status", "execute_input")]
        return reply["content"], outputs


def _is_idle(messages: list[Message]) -> bool:
    return any(each["content"].get("execution_state") == "idle" for each in messages)


def _is_used(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
