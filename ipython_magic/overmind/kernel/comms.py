# SPDX-License-Identifier: MIT
"""Comms: the `comm` package, which ipywidgets and others use, connected to this kernel's iopub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import comm
from comm.base_comm import BaseComm, CommManager

if TYPE_CHECKING:
    from overmind.kernel.kernel import Kernel


class _Comm(BaseComm):  # type: ignore[misc]
    kernel: Kernel

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        content = {"data": {} if data is None else data, "comm_id": self.comm_id, **keys}
        self.kernel.publish(msg_type, content, metadata=metadata or {}, buffers=buffers)


def install(kernel: Kernel) -> CommManager:
    """Makes `comm` this kernel's; its manager."""
    manager = CommManager()

    def create(*args: Any, **kwargs: Any) -> _Comm:
        return _Comm(*args, **kwargs)

    _Comm.kernel = kernel
    _Guarded.functions = {"create_comm": create, "get_comm_manager": lambda: manager}
    for name, function in _Guarded.functions.items():
        setattr(comm, name, function)
    comm.__class__ = _Guarded
    return manager


class _Guarded(type(comm)):  # type: ignore[misc]
    """`import ipykernel.ipkernel` puts its own functions there, whose comms would lead nowhere."""

    functions: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        foreign = getattr(value, "__module__", "").startswith("ipykernel.")
        super().__setattr__(name, self.functions.get(name, value) if foreign else value)


def comm_info(manager: CommManager, target_name: str | None) -> dict[str, Any]:
    """The content of a comm_info_reply."""
    comms = {
        key: {"target_name": one.target_name}
        for key, one in list(manager.comms.items())
        if target_name is None or one.target_name == target_name
    }
    return {"comms": comms, "status": "ok"}
