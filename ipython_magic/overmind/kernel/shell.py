# SPDX-License-Identifier: MIT
"""The IPython shell of the kernel: displays, results, tracebacks and pages go to the frontend.

The shell can be made before there is a kernel (`prepare` in app.py): until `attach` it publishes nothing, and keeps
no history.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any

from IPython.core import history, page
from IPython.core.autocall import ZMQExitAutocall
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.extensions import ExtensionManager
from IPython.core.interactiveshell import InteractiveShell, InteractiveShellABC
from IPython.core.usage import default_banner
from IPython.utils.process import system
from traitlets import Any as AnyTrait
from traitlets import CBool, Instance, Type, default, observe

from overmind.kernel import ENVIRONMENT, interrupts
from overmind.kernel.cell_files import CellCompiler

Hook = Callable[[dict[str, Any]], "dict[str, Any] | None"]


class _Hooks:
    """Functions that may change or swallow a message before it is published; one list per thread, as in ipykernel."""

    def __init__(self) -> None:
        self._local = threading.local()

    def list(self) -> list[Hook]:
        if not hasattr(self._local, "hooks"):
            self._local.hooks = []
        hooks: list[Hook] = self._local.hooks
        return hooks

    def apply(self, msg_type: str, content: dict[str, Any]) -> dict[str, Any] | None:
        hooks = self.list()
        if not hooks:
            return content
        message: dict[str, Any] | None = {"header": {"msg_type": msg_type}, "msg_type": msg_type, "content": content}
        for hook in hooks:
            message = hook(message)  # type: ignore[arg-type]
            if message is None:
                return None
        return message["content"]  # type: ignore[index,no-any-return]


class KernelDisplayPublisher(DisplayPublisher):  # type: ignore[misc]
    """display() and clear_output()."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hooks = _Hooks()

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_kwargs: Any,
    ) -> None:
        self._validate_data(data, metadata)
        content = {"data": data, "metadata": metadata or {}, "transient": transient or {}}
        self._send("update_display_data" if update else "display_data", content)

    def clear_output(self, wait: bool = False) -> None:
        self._send("clear_output", {"wait": wait})

    def register_hook(self, hook: Hook) -> None:
        self._hooks.list().append(hook)

    def unregister_hook(self, hook: Hook) -> bool:
        try:
            self._hooks.list().remove(hook)
        except ValueError:
            return False
        return True

    def _send(self, msg_type: str, content: dict[str, Any]) -> None:
        flush_streams()
        changed = self._hooks.apply(msg_type, content)
        if changed is not None and self.shell.kernel is not None:
            self.shell.kernel.publish(msg_type, changed, topic="display_data")


class KernelDisplayHook(DisplayHook):  # type: ignore[misc]
    """The value of a cell's last expression."""

    _content: dict[str, Any] | None = None

    def start_displayhook(self) -> None:
        self._is_active = True
        self._content = {"data": {}, "metadata": {}}

    def write_output_prompt(self) -> None:
        if self._content is not None:
            self._content["execution_count"] = self.prompt_count

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        if self._content is not None:
            self._content["data"] = format_dict
            self._content["metadata"] = md_dict or {}

    def finish_displayhook(self) -> None:
        flush_streams()
        content, self._content = self._content, None
        self._is_active = False
        if content and content["data"] and self.shell.kernel is not None:
            self.shell.kernel.publish("execute_result", content)

    @property
    def is_formatting(self) -> bool:
        """Whether a result is being made into its representations: an error shown now is the cell's."""
        return self._content is not None


# The name is how users configure it.
class HistoryManager(history.HistoryManager):  # type: ignore[misc]
    """Takes locks that an interrupt must not leave taken: no cell after it would ever end."""

    def store_inputs(self, *args: Any, **kwargs: Any) -> None:
        interrupts.held(lambda: super(HistoryManager, self).store_inputs(*args, **kwargs))

    def store_output(self, *args: Any, **kwargs: Any) -> None:
        interrupts.held(lambda: super(HistoryManager, self).store_output(*args, **kwargs))


def flush_streams() -> None:
    """What was printed before a message appears before it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


class KernelExtensions(ExtensionManager):  # type: ignore[misc]
    """IPython's, for a kernel that has loaded Overmind before the first cell. That cell asks for it all the same, where
    a notebook is run in other kernels too, and must not be told what to do instead."""

    def load_extension(self, module_str: str) -> str | None:
        try:
            found: str | None = super().load_extension(module_str)
        except BaseException as error:  # its traceback shows what failed, not this function: as in any kernel
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        if module_str != "overmind" or found != "already loaded":
            return found
        from overmind import extension

        extension.load_ipython_extension(self.shell)  # idempotent; prints only what the user has to know
        return None


# The name is how libraries (rich, tqdm, plotly) tell a notebook from a terminal.
class ZMQInteractiveShell(InteractiveShell):  # type: ignore[misc]
    """InteractiveShell whose terminal is a Jupyter frontend."""

    compiler_class = Type(CellCompiler)
    displayhook_class = Type(KernelDisplayHook)
    display_pub_class = Type(KernelDisplayPublisher)
    kernel = AnyTrait(None)
    autoindent = CBool(False)
    exiter = Instance(ZMQExitAutocall)
    keepkernel_on_exit: bool | None = None

    # The traceback of the cell that ran last, and whether it came up while its result was formatted.
    last_traceback: list[str] | None = None
    failed_while_formatting = False
    _with_history = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "IPKernelApp" not in self.config:  # tqdm, huggingface_hub and others look for it
            self.config.IPKernelApp.kernel_class = "overmind"

    @default("banner1")  # type: ignore[untyped-decorator]
    def _default_banner1(self) -> str:
        return str(default_banner)

    @default("exiter")  # type: ignore[untyped-decorator]
    def _default_exiter(self) -> ZMQExitAutocall:
        return ZMQExitAutocall(self)

    @observe("exit_now")  # type: ignore[untyped-decorator]
    def _exit_now_changed(self, change: Any) -> None:
        if change["new"] and self.kernel is not None:
            self.kernel.stop_soon()

    def attach(self, kernel: Any) -> None:
        """The kernel is there: publish through it, and keep history from now on. Once."""
        self.kernel = kernel
        self.starting_dir = os.getcwd()  # the shell may have been made in another folder
        self.exit_now = False
        self._with_history = True
        self.configurables.remove(self.history_manager)
        self.init_history()
        self.init_user_ns()

    def init_history(self) -> None:
        # A history takes a database, a row in it and a thread: not before it is known that cells will run.
        options = {} if self._with_history else {"enabled": False}
        self.history_manager = HistoryManager(shell=self, parent=self, **options)
        self.configurables.append(self.history_manager)

    def init_extension_manager(self) -> None:
        self.extension_manager = KernelExtensions(shell=self, parent=self)
        self.configurables.append(self.extension_manager)

    def init_environment(self) -> None:
        os.environ.update(ENVIRONMENT)

    def init_virtualenv(self) -> None:
        """A kernel runs in the environment that its kernelspec names, whatever is activated around it."""

    def init_hooks(self) -> None:
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(self._page), 99)

    def init_magics(self) -> None:
        from overmind.kernel.magics import KernelMagics

        super().init_magics()
        self.register_magics(KernelMagics)
        self.magics_manager.register_alias("ed", "edit")

    def enable_gui(self, gui: str | None = None) -> None:
        """asyncio runs anyway; matplotlib's notebook backends need no loop of their own."""
        if gui not in (None, "asyncio", "inline", "nbagg", "webagg", "notebook", "ipympl", "widget"):
            raise UsageError(f"the event loop {gui!r} can't run in this kernel; use the ipykernel kernel for it")
        self.active_eventloop = gui

    def _page(self, text: Any, start: int = 0, screen_lines: int = 0, pager_cmd: Any = None) -> None:
        data = text if isinstance(text, dict) else {"text/plain": text}
        self.payload_manager.write_payload({"source": "page", "data": data, "start": max(0, start)})

    def ask_exit(self) -> None:
        self.exit_now = not self.keepkernel_on_exit
        self.payload_manager.write_payload({"source": "ask_exit", "keepkernel": self.keepkernel_on_exit})

    def set_next_input(self, text: str, replace: bool = False) -> None:
        self.payload_manager.write_payload({"source": "set_next_input", "text": text, "replace": replace})

    def forget_traceback(self) -> None:
        self.last_traceback = None
        self.failed_while_formatting = False

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        flush_streams()
        if getattr(self.displayhook, "is_formatting", False):
            self.failed_while_formatting = True
        self.last_traceback = stb
        if self.kernel is not None:
            self.kernel.publish("error", {"traceback": stb, "ename": etype.__name__, "evalue": text_of(evalue)})

    def system_piped(self, cmd: str) -> None:
        """!command. Its exit status goes to `_exit_code`: returning it would display it."""
        if cmd.rstrip().endswith("&"):
            raise OSError("Background processes not supported.")
        status = system(self.var_expand(cmd, depth=1))
        self.user_ns["_exit_code"] = status
        if getattr(self, "system_raise_on_error", False) and status != 0:
            raise CalledProcessError(status, cmd)

    system = system_piped

    def get_parent(self) -> dict[str, Any]:
        """The request that is being answered, as a message."""
        return {} if self.kernel is None else self.kernel.get_parent()


InteractiveShellABC.register(ZMQInteractiveShell)


def text_of(error: BaseException) -> str:
    """str(error), whatever its __str__ does."""
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose __str__ fails>"
