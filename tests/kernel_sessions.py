# SPDX-License-Identifier: MIT
"""Kernels for tests: started through jupyter_client, asked for cells, shut down by their owner."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from overmind.kernel import kernelspec

SECONDS = 60.0


class Manager(KernelManager):
    """A KernelManager for an argv, without a kernelspec on disk."""

    argv: list[str] = []  # noqa: RUF012 (a trait would be in the way)

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=self.argv, display_name="test", language="python")


def ours() -> list[str]:
    return kernelspec.argv()


def ipykernel() -> list[str]:
    return [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]


class Session:
    """A running kernel and its client."""

    def __init__(
        self,
        argv: list[str],
        *,
        transport: str = "tcp",
        folder: Path | None = None,
        zygote: bool = False,
        **options: Any,
    ) -> None:
        """A plain start unless `zygote` allows a fork: what that adds is the matter of tests/starts."""
        self.strays: list[dict[str, Any]] = []  # iopub messages that were passed over
        self.manager = Manager(transport=transport)
        self.manager.argv = argv
        if folder is not None:
            self.manager.connection_file = str(folder / "k.json")
        if transport == "ipc":
            self.manager.ip = str(folder / "k")
        environment = dict(options.get("env") or os.environ)
        environment.pop("PYTEST_CURRENT_TEST", None)  # ipykernel then leaves C's output alone
        if not zygote:
            environment["OVERMIND_ZYGOTE"] = "0"
        options["env"] = environment
        self.manager.start_kernel(**options)
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=SECONDS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent; the kernel may be gone already."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel()

    def send(self, code: str, **options: Any) -> str:
        return self.client.execute(code, **options)

    def reply(self, msg_id: str, channel: str = "shell") -> dict[str, Any]:
        """The reply to a request, passing over others."""
        deadline = time.monotonic() + SECONDS
        while True:
            get = getattr(self.client, f"get_{channel}_msg")
            message = get(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") == msg_id:
                return message

    def outputs(self, msg_id: str, until: Callable[[dict[str, Any]], bool] | None = None) -> list[dict[str, Any]]:
        """The iopub messages of a request, up to its idle, or up to the first that `until` accepts."""
        deadline = time.monotonic() + SECONDS
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != msg_id:
                self.strays.append(message)
                continue
            found.append(message)
            if until is not None:
                if until(message):
                    return found
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return found

    def run(self, code: str, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Content of the reply, and the outputs without the two status messages."""
        msg_id = self.send(code, **options)
        outputs = self.outputs(msg_id)
        return self.reply(msg_id)["content"], [one for one in outputs if one["msg_type"] != "status"]

    def text(self, code: str, **options: Any) -> str:
        """What a cell that must not fail prints to stdout."""
        reply, outputs = self.run(code, **options)
        assert reply["status"] == "ok", reply
        return text_of(outputs)


def text_of(outputs: list[dict[str, Any]], name: str = "stdout") -> str:
    streams = (one["content"] for one in outputs if one["msg_type"] == "stream")
    return "".join(content["text"] for content in streams if content["name"] == name)


@contextmanager
def session(argv: list[str], **options: Any) -> Any:
    running = Session(argv, **options)
    try:
        yield running
    finally:
        running.close()
