# SPDX-License-Identifier: MIT
"""Which request an output belongs to: the one whose cell started the task that makes it; in threads of the user's
own, which inherit nothing, the latest one."""

from __future__ import annotations

from contextvars import ContextVar
from functools import cached_property
from typing import Any

from overmind import _kernel
from overmind.kernel.packing import unpack


class Incoming:
    """A request with its parts, taken out of their JSON on first use."""

    def __init__(self, raw: _kernel.Request) -> None:
        """ValueError: its header is none."""
        self.raw = raw
        header = unpack(raw.header)
        if not isinstance(header, dict) or not isinstance(header.get("msg_type"), str):
            raise ValueError("a message without a type")
        self.header: dict[str, Any] = header
        self.msg_type: str = header["msg_type"]
        self.aborted = False  # a cell before it failed

    @cached_property
    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = unpack(self.raw.content)
        return content

    @cached_property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = unpack(self.raw.metadata)
        return metadata

    @cached_property
    def message(self) -> dict[str, Any]:
        """As jupyter_client presents a message: what comm handlers and `get_parent` give to the user's code."""
        return {
            "header": self.header,
            "msg_id": self.header.get("msg_id", ""),
            "msg_type": self.msg_type,
            "parent_header": unpack(self.raw.parent_header),
            "metadata": self.metadata,
            "content": self.content,
            "buffers": self.raw.buffers,
        }


class Parents:
    """The request that the calling task or thread works for."""

    def __init__(self) -> None:
        self._inherited: ContextVar[Incoming] = ContextVar("overmind_parent")
        self._latest: Incoming | None = None

    def set(self, request: Incoming) -> None:
        self._inherited.set(request)
        self._latest = request

    def get(self) -> Incoming | None:
        return self._inherited.get(self._latest)

    def raw(self) -> _kernel.Request | None:
        request = self.get()
        return None if request is None else request.raw
