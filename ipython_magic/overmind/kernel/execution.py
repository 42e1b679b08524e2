# SPDX-License-Identifier: MIT
"""execute_request: runs a cell."""

from __future__ import annotations

import asyncio
import builtins
import getpass
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import _asyncio_runner

from overmind.kernel import interrupts
from overmind.kernel.packing import pack, unpack
from overmind.kernel.parents import Incoming
from overmind.kernel.shell import flush_streams, text_of

if TYPE_CHECKING:
    from overmind.kernel.kernel import Kernel


class Executor:
    """Runs the cells of one kernel, on the main thread, one after another."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._shell = kernel.shell
        parameters = inspect.signature(self._shell.run_cell).parameters
        self._optional = [name for name in ("cell_id", "cell_meta") if name in parameters]

    async def execute(self, request: Incoming) -> tuple[dict[str, Any], bytes]:
        """Content and metadata of the execute_reply. What the cell raises is in it; an exception is a fault of the
        request or of the kernel."""
        started = datetime.now(timezone.utc)
        content = request.content
        code: str = content["code"]
        silent: bool = content.get("silent", False)
        if not silent:
            shown = {"code": code, "execution_count": self._shell.execution_count}
            self._kernel.publish("execute_input", shown, request)
        with self._input_from(request, bool(content.get("allow_stdin", False))):
            result = await self._run(code, silent, content.get("store_history", not silent), request.metadata)
            reply = self._reply(result, content.get("user_expressions") or {})
        metadata = {
            "started": started,
            "dependencies_met": reply.get("ename") != "UnmetDependency",
            "engine": self._kernel.ident,
            "status": reply["status"],
        }
        return reply, pack(metadata)

    async def _run(self, code: str, silent: bool, store_history: bool, metadata: dict[str, Any]) -> Any:
        """IPython's ExecutionResult."""
        shell = self._shell
        shell.forget_traceback()
        options = {"cell_id": metadata.get("cellId"), "cell_meta": metadata}
        options = {name: options[name] for name in self._optional}
        options.update(store_history=store_history, silent=silent)

        def begin() -> tuple[Any, Any]:
            """The result, or the coroutine that makes it."""
            failure = None
            try:
                transformed = shell.transform_cell(code)
            except Exception:
                transformed, failure = code, sys.exc_info()
            asynchronous = shell.loop_runner is _asyncio_runner and shell.should_run_async(
                code, transformed_cell=transformed, preprocessing_exc_tuple=failure
            )
            if not asynchronous:
                return shell.run_cell(code, **options), None
            transforming = {"transformed_cell": transformed, "preprocessing_exc_tuple": failure}
            return None, shell.run_cell_async(code, **transforming, **options)

        result, cell = interrupts.armed(begin)
        return result if cell is None else await self._run_async(cell, silent)

    async def _run_async(self, cell: Any, silent: bool) -> Any:
        task = asyncio.ensure_future(cell)
        result = None
        try:
            with interrupts.cancelling(task, cell):
                result = await task
            return result
        finally:
            interrupts.armed(lambda: self._after_cell(result, silent))

    def _after_cell(self, result: Any, silent: bool) -> None:
        self._shell.events.trigger("post_execute")
        if not silent:
            self._shell.events.trigger("post_run_cell", result)

    def _reply(self, result: Any, expressions: dict[str, str]) -> dict[str, Any]:
        shell = self._shell
        reply: dict[str, Any] = {"status": "ok"}
        if not result.success or shell.failed_while_formatting:
            error = result.error_before_exec if result.error_before_exec is not None else result.error_in_exec
            reply = error_content(error, shell.last_traceback or [])
            reply["engine_info"] = {"engine_uuid": self._kernel.ident, "engine_id": -1, "method": "execute"}
        reply["execution_count"] = shell.execution_count - 1
        reply["user_expressions"] = {}
        if reply["status"] == "ok" and expressions:
            reply["user_expressions"] = interrupts.armed(lambda: shell.user_expressions(expressions))
        reply["payload"] = shell.payload_manager.read_payload()
        shell.payload_manager.clear_payload()
        return reply

    @contextmanager
    def _input_from(self, request: Incoming, allowed: bool) -> Iterator[None]:
        """Within, input() and getpass() ask the client of `request`."""

        def ask(prompt: object = "") -> str:
            return self._ask(request, allowed, str(prompt), False)

        def ask_secret(prompt: str = "Password: ", stream: Any = None, *, echo_char: str | None = None) -> str:
            return self._ask(request, allowed, prompt, True)

        before = builtins.input, getpass.getpass
        builtins.input, getpass.getpass = ask, ask_secret
        try:
            yield
        finally:
            builtins.input, getpass.getpass = before

    def _ask(self, request: Incoming, allowed: bool, prompt: str, password: bool) -> str:
        if not allowed:
            name = "getpass" if password else "raw_input"
            raise StdinNotImplementedError(f"{name} was called, but this frontend does not support input requests.")
        flush_streams()
        try:
            answer = self._kernel.channels.ask(request.raw, pack({"prompt": prompt, "password": password}))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Interrupted by user") from None
        value = str(unpack(answer).get("value", ""))
        if value == "\x04":
            raise EOFError
        return value


def error_content(error: BaseException | None, traceback: list[str]) -> dict[str, Any]:
    """The part of a reply that tells of an error."""
    return {
        "status": "error",
        "traceback": traceback,
        "ename": type(error).__name__,
        "evalue": str(None) if error is None else text_of(error),  # None: only the display of a result failed
    }
