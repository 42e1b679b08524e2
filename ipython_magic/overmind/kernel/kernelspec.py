# SPDX-License-Identifier: MIT
"""Installing the kernel where Jupyter finds it. All of it needs jupyter_client, installing also the compiled kernel."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overmind import launch
from overmind.kernel import DISPLAY_NAME, NAME

_MARK = "overmind"  # in a spec's metadata: what `list` and `remove` go by


class KernelspecError(Exception):
    """It can't be done; the text says why and what to do."""


@dataclass(frozen=True)
class Kind:
    """One of the kernels that the launcher can start: how its kernelspec is called, and what it needs."""

    name: str
    display_name: str
    packages: tuple[str, ...]


KINDS = {
    "xeus": Kind(NAME, DISPLAY_NAME, ("comm", "jupyter_client")),
    "ipykernel": Kind(f"{NAME}-ipykernel", "Python 3 (Overmind, ipykernel)", ("ipykernel", "jupyter_client")),
}


def argv(engine: str = "xeus") -> list[str]:
    """How a frontend starts the kernel: the only place that says so."""
    return launch.command("kernel", engine, "-f", "{connection_file}")


def spec(display_name: str, engine: str = "xeus") -> dict[str, Any]:
    """kernel.json. It does not claim CurveZMQ, which xeus can't do."""
    metadata = {
        _MARK: True,
        "debugger": importlib.util.find_spec("debugpy") is not None,
        "interpreter": {"path": sys.executable},  # VS Code looks here for the environment; argv names the launcher
    }
    return {
        "argv": argv(engine),
        "display_name": display_name,
        "language": "python",
        "interrupt_mode": "signal",
        "metadata": metadata,
    }


def missing(engine: str = "xeus") -> str | None:
    """Why the kernel can't run in this environment, with what to do; None if it can."""
    if engine == "xeus" and importlib.util.find_spec("overmind._kernel") is None:
        return (
            "overmind was built without its kernel, because xeus was not there: install xeus-dev (Debian 12), "
            "xeus-dev and xeus-zmq-dev (Debian 13), or xeus and xeus-zmq (conda-forge), then reinstall overmind-jupyter"
        )
    for package in KINDS[engine].packages:
        if importlib.util.find_spec(package) is None:
            return f"the kernel needs the package {package}: pip install 'overmind-jupyter[kernel]'"
    return None


def install(
    name: str | None = None,
    *,
    engine: str = "xeus",
    user: bool = False,
    sys_prefix: bool = False,
    display_name: str | None = None,
) -> tuple[str, Path]:
    """Writes the kernelspec, over an older one; its name and folder. Without a choice: into this environment if it is
    a virtual one, else for the user. KernelspecError."""
    name = name or KINDS[engine].name
    reason = missing(engine)
    if reason is not None:
        raise KernelspecError(reason)
    if user and sys_prefix:
        raise KernelspecError("--user and --sys-prefix exclude each other")
    if not user and not sys_prefix:
        sys_prefix = _is_own_environment()
    manager = _manager()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(
            json.dumps(spec(display_name or KINDS[engine].display_name, engine), indent=1) + "\n"
        )
        Path(folder).chmod(0o755)
        try:
            place = manager.install_kernel_spec(
                folder, kernel_name=name, user=not sys_prefix, prefix=sys.prefix if sys_prefix else None
            )
        except (OSError, ValueError) as error:
            raise KernelspecError(f"the kernelspec {name} could not be written: {error}") from error
    return name, Path(place)


def installed() -> dict[str, Path]:
    """The kernelspecs of Overmind that Jupyter finds from here: name and folder."""
    found = {}
    for name, folder in _manager().find_kernel_specs().items():
        try:
            metadata = json.loads(Path(folder, "kernel.json").read_text()).get("metadata", {})
        except (OSError, ValueError):
            continue
        if isinstance(metadata, dict) and metadata.get(_MARK):
            found[name] = Path(folder)
    return found


def remove(name: str = NAME) -> Path:
    """Deletes a kernelspec of Overmind; the folder that it was in. KernelspecError."""
    folder = installed().get(name)
    if folder is None:
        raise KernelspecError(
            f"no kernelspec of Overmind is called {name}; `overmind kernel list` shows those there are"
        )
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise KernelspecError(f"{folder} could not be removed: {error}") from error
    return folder


def _is_own_environment() -> bool:
    return sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir()


def _manager() -> Any:
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError:
        raise KernelspecError("this needs jupyter_client: pip install 'overmind-jupyter[kernel]'") from None
    return KernelSpecManager()
