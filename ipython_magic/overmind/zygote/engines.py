# SPDX-License-Identifier: MIT
"""The kernels that can be started: where their two functions are.

`prepare()` does all that needs neither a connection nor anything of the request: it runs in a standby. `outdated()` is
asked when a request has come: a reason if what was prepared is not what would be made now. `serve(file)` runs the
kernel until it ends. `imports` are imported ahead for it in every zygote. `environment` is what it sets
before the user's first cell: imports ahead must see it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
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

    def serve(self, connection_file: str) -> None:
        importlib.import_module(self.module).serve(connection_file)


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
