# SPDX-License-Identifier: MIT
"""Starting a kernel. `main` does it all; a standby calls `prepare` ahead of need and `serve` when it is known whom to
serve. Neither is called twice in a process.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from IPython.core.application import (
    ENV_CONFIG_DIRS,
    SYSTEM_CONFIG_DIRS,
    BaseIPythonApplication,
    base_aliases,
    base_flags,
)
from IPython.core.profiledir import ProfileDir
from IPython.core.shellapp import InteractiveShellApp, shell_aliases, shell_flags
from traitlets import Any as AnyTrait
from traitlets import Dict, Unicode

from overmind.kernel import MPLBACKEND, connection
from overmind.kernel.kernel import Kernel
from overmind.kernel.shell import ZMQInteractiveShell

_log = logging.getLogger("overmind")


# The name is that of ipykernel's application, so that what users configured for it (ipython_kernel_config.py, start-up
# files, extensions, c.IPKernelApp.matplotlib) holds here as well.
class IPKernelApp(BaseIPythonApplication, InteractiveShellApp):  # type: ignore[misc]
    """IPython's configuration for a kernel."""

    name = "ipython-kernel"
    aliases = Dict({**base_aliases, **shell_aliases, "f": "IPKernelApp.connection_file"})
    flags = Dict({**base_flags, **shell_flags})
    classes = [ZMQInteractiveShell, ProfileDir]  # noqa: RUF012 (a traitlets interface)
    connection_file = Unicode("", help="JSON file with the kernel's ports and key").tag(config=True)
    kernel = AnyTrait(None)
    _elsewhere: str | None = None  # in the place of IPython's folder, if that can't be made

    def init_crash_handler(self) -> None:
        sys.excepthook = _print_to_real_stderr

    def init_profile_dir(self) -> None:
        """Where the disk is full, IPython's folder is what could be made of it, or another one for this kernel."""
        try:
            self._find_profile()
        except OSError as error:
            folder = self._elsewhere = tempfile.mkdtemp(prefix="ipython-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            print(
                f"overmind kernel: IPython's folder can't be made ({error}); history and settings are in {folder} "
                "and go with this kernel",
                file=sys.stderr,
            )
            path = list(sys.path)
            self.ipython_dir = folder  # its observer takes one folder for another out of sys.path
            sys.path[:] = path
            self._find_profile()

    def _find_profile(self) -> None:
        try:
            super().init_profile_dir()
        except OSError:
            # A text that IPython puts there for people to read; it is the last thing, and not written again.
            super().init_profile_dir()

    def init_shell(self) -> None:
        self.shell = ZMQInteractiveShell.instance(
            parent=self, ipython_dir=self._elsewhere, profile_dir=self.profile_dir, user_ns=self.user_ns
        )
        self.shell.configurables.append(self)

    def start_user_code(self) -> None:
        """Everything of the user's that runs before the first cell."""
        self.init_path()
        self.init_gui_pylab()
        self.init_extensions()
        _load_overmind(self.shell)
        self.init_code()


def configured() -> str | None:
    """Why the shell can't be made ahead of need, None if it can. Configuration is code of the user's, which may look
    at everything and open files; a new profile is a folder of the user's."""
    # IPython itself would make a folder while it looks for one that it may write to.
    profile = Path(os.environ.get("IPYTHONDIR", "~/.ipython")).expanduser() / "profile_default"
    whole = (profile / "startup").is_dir()  # the last that IPython makes there
    if not os.access(profile.parent, os.W_OK) or not whole:
        return f"{profile} is to be made"
    for folder in (profile, *ENV_CONFIG_DIRS, *SYSTEM_CONFIG_DIRS):
        for name in ("ipython_config", "ipython_kernel_config"):
            for suffix in (".py", ".json"):
                if os.path.exists(path := os.path.join(folder, name + suffix)):
                    return f"{path} is there"
    return None


def prepare(argv: list[str] | None = None) -> IPKernelApp:
    """Reads the configuration and makes the shell: no sockets, no threads, nothing of the user's runs. `argv` are
    IPython's options. The process must have its environment and HOME by now."""
    # Before any import of matplotlib, and below anything that the user says.
    os.environ.setdefault("MPLBACKEND", MPLBACKEND)
    app: IPKernelApp = IPKernelApp.instance()
    app.initialize(argv or [])
    app.init_shell()
    return app


def serve(connection_file: str | os.PathLike[str]) -> int:
    """Runs the kernel that `prepare` made ready, until it is shut down; the exit status of the process. Says on stderr
    why a kernel can't be had."""
    path = Path(connection_file).absolute()
    try:
        wanted = connection.read(path)
        kernel = _make_kernel(wanted, path)
    except (connection.ConnectionFileError, ValueError, OSError) as error:
        print(f"overmind kernel: {error}", file=sys.stderr)
        return 1
    app = IPKernelApp.instance()
    app.kernel = kernel
    atexit.register(kernel.close)
    try:
        kernel.open()
        app.start_user_code()
        kernel.run()
    finally:
        kernel.close()
    return 0


def main(argv: list[str]) -> int:
    """`python -m overmind.kernel -f FILE [options of IPython]`; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the kernel is there; see interrupts.py
    prepare(argv)
    return serve(named_file())


def named_file() -> str:
    """The connection file that the options given to `prepare` name; one of this process's own if they name none."""
    return IPKernelApp.instance().connection_file or f"kernel-{os.getpid()}.json"


def _make_kernel(wanted: dict[str, Any], path: Path) -> Kernel:
    kernel = Kernel(IPKernelApp.instance().shell, wanted, path)
    if connection.complete(path, wanted, kernel.channels.ports):
        atexit.register(path.unlink, missing_ok=True)
    return kernel


def _load_overmind(shell: ZMQInteractiveShell) -> None:
    """What %load_ext overmind does. A kernel without it is still a kernel."""
    try:
        shell.extension_manager.load_extension("overmind")
    except Exception:
        _log.warning("the overmind extension could not be loaded, loads are native:\n%s", traceback.format_exc())


def _print_to_real_stderr(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    traceback.print_exception(kind, value, trace, file=sys.__stderr__)
