# SPDX-License-Identifier: MIT
"""The kernels that can be started: where their two functions are.

`prepare()` does all that needs neither a connection nor anything of the request: it runs in a standby. `serve(file)`
runs the kernel until it ends. `imports` are imported ahead for it in every zygote.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    module: str
    imports: tuple[str, ...]

    def prepare(self) -> None:
        importlib.import_module(self.module).prepare()

    def serve(self, connection_file: str) -> None:
        importlib.import_module(self.module).serve(connection_file)


ENGINES = {
    "xeus": Engine("overmind.kernel.app", ("IPython",)),
    "ipykernel": Engine("overmind.zygote.ipykernel_engine", ("ipykernel.kernelapp",)),
}
