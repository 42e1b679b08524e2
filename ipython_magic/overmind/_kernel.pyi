# SPDX-License-Identifier: MIT
"""A Jupyter kernel's channels, over xeus. Everything but identities and buffers is JSON text in bytes."""

from collections.abc import Callable, Iterable
from typing import Any

XEUS_VERSION: str

def murmur2(text: str, seed: int) -> int:
    """MurmurHash2 of the text in UTF-8, 32 bits."""

class Request:
    """A message that came in."""

    @property
    def header(self) -> bytes: ...
    @property
    def parent_header(self) -> bytes: ...
    @property
    def metadata(self) -> bytes: ...
    @property
    def content(self) -> bytes: ...
    @property
    def buffers(self) -> list[memoryview]: ...
    @property
    def identities(self) -> list[bytes]: ...
    @property
    def replied(self) -> bool:
        """Whether `Channels.reply` answered it."""

    @property
    def channel(self) -> str:
        """ "shell" or "control"."""

class Channels:
    """One kernel's sockets and threads. `publish`, `status`, `write`, `flush`, `set_parent` and `ask` may be called
    from any thread, the rest from the thread that made it. In a forked child it does nothing."""

    def __init__(self, connection: dict[str, Any], username: str) -> None:
        """Binds what the connection file says. ValueError: it can't be bound, or its signature scheme is unknown."""

    @property
    def ports(self) -> dict[str, int]:
        """As bound, under the names of the connection file."""

    @property
    def session(self) -> str: ...
    @property
    def shell_fd(self) -> int:
        """Readable when `receive` may have something. Edge-triggered, and a reply can swallow an edge: call `receive`
        until it returns None after each reply and before each wait."""

    def start(self, on_control: Callable[[Request], None], parent_pid: int) -> None:
        """Heartbeat, iopub and control begin. `on_control` is called on the control thread, one request after
        another, and replies there; interrupts never reach it. The process ends when `parent_pid` does (0: never)."""

    def stop_control(self) -> None:
        """Control requests stay unanswered from here on. Before the interpreter ends."""

    def capture_descriptors(self) -> None:
        """What is written to descriptors 1 and 2 becomes stream messages, too."""

    def release_descriptors(self) -> None: ...
    def original_descriptor(self, stream: int) -> int:
        """Where descriptor 1 (stream 0) or 2 (stream 1) led before; -1 unless captured."""

    def receive(self) -> Request | None:
        """The next message of the shell channel; never waits."""

    def reply(
        self,
        request: Request,
        msg_type: str,
        content: bytes,
        metadata: bytes = ...,
        buffers: Iterable[Any] | None = None,
    ) -> None:
        """Answers on the channel where the request came from; nothing if that was done. RuntimeError: wrong thread."""

    def publish(
        self,
        msg_type: str,
        content: bytes,
        parent: Request | None = None,
        metadata: bytes = ...,
        buffers: Iterable[Any] | None = None,
        topic: str = "",
    ) -> None:
        """Sends on iopub; never waits for a client."""

    def status(self, state: str, parent: Request | None = None) -> None: ...
    def ask(self, request: Request, content: bytes) -> bytes:
        """An input_request to the client of `request`; its answer's content. What a signal handler raises ends it."""

    def write(self, stream: int, text: str, parent: Request | None) -> bool:
        """stdout (0) or stderr (1), sent soon. False in a forked child: nothing was written."""

    def set_parent(self, parent: Request | None) -> None:
        """Whose output it is that comes from captured descriptors."""

    def flush(self) -> None:
        """Everything written so far, on either level, is published before this returns."""
