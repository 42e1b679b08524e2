# SPDX-License-Identifier: MIT
"""The kernels that can be started: where their functions are.

`prepare()` does all that needs neither a connection nor anything of the request: it runs in a standby. It is for starts
without options; others are of a fork in which it was not called. `outdated()` is asked when a request has come: a
reason if what was prepared is not what would be made now. `serve(arguments)` runs the kernel until it ends, as
`python -m KERNEL arguments` does. `imports` are imported ahead for it in every zygote. `environment` is what it sets
before the user's first cell: imports ahead must see it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overmind.kernel import ENVIRONMENT, MPLBACKEND


@dataclass(frozen=True)
class Engine:
    module: str
    imports: tuple[str, ...]
    environment: Mapping[str, str]
    shell: tuple[str, str]  # its module, which is there after the imports, and its name

    def shell_type(self) -> type:
        found: type = getattr(importlib.import_module(self.shell[0]), self.shell[1])
        return found

    def prepare(self) -> None:
        importlib.import_module(self.module).prepare()

    def outdated(self) -> str | None:
        reason: str | None = importlib.import_module(self.module).outdated()
        return reason

    def serve(self, arguments: Sequence[str]) -> None:
        importlib.import_module(self.module).serve(arguments)


def has_options(arguments: Sequence[str]) -> bool:
    """Whether they say more than which connection file to use: options of IPython's, in whatever order and form."""
    return len(arguments) != 2 or arguments[0] != "-f"


_NOTEBOOK = {**ENVIRONMENT, "MPLBACKEND": os.environ.get("MPLBACKEND", MPLBACKEND)}

ENGINES = {
    "xeus": Engine(
        "overmind.zygote.xeus_engine",
        ("overmind.kernel.app",),
        _NOTEBOOK,
        ("overmind.kernel.shell", "ZMQInteractiveShell"),
    ),
    "ipykernel": Engine(
        "overmind.zygote.ipykernel_engine",
        ("ipykernel.kernelapp",),
        _NOTEBOOK,
        ("ipykernel.zmqshell", "ZMQInteractiveShell"),
    ),
}
