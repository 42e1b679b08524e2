# SPDX-License-Identifier: MIT
"""safetensors.torch.load_file. A plain load maps the file already; a hit keeps what was read from being evicted."""

from __future__ import annotations

import os

from overmind.loader import BoundCall, Loader
from overmind.loaders.common import given, wrap_all


def _refuse(call: BoundCall) -> str | None:
    file = given(call, "filename")
    if not isinstance(file, (str, os.PathLike)):
        return f"it reads from a {type(file).__name__}"
    device = given(call, "device")
    if isinstance(device, int) or str(device) != "cpu":
        return f"device={device!r}: devices other than the CPU are not tested"
    return None


LOAD_FILE = Loader(
    name="safetensors.torch.load_file",
    target="filename",
    libraries=("torch", "safetensors"),
    changes_process=False,
    refuse=_refuse,
)

HOOKS = (("safetensors.torch", wrap_all(("load_file", LOAD_FILE))),)
