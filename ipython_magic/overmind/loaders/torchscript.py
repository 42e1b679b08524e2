# SPDX-License-Identifier: MIT
"""torch.jit.load: every record of the archive is read and copied; a hit compiles its code and maps its weights."""

from __future__ import annotations

import sys
from types import ModuleType

from overmind.loader import BoundCall, Loader
from overmind.loaders.common import first, given, open_file, wrap_twins
from overmind.patching import PatchSet


def _arguments(call: BoundCall) -> str | None:
    location = given(call, "map_location")
    if location is not None and str(location) != "cpu":
        return f"map_location={location!r}: devices other than the CPU are not tested"
    if given(call, "_restore_shapes"):
        return "_restore_shapes=True runs the module on its stored inputs"
    extra = given(call, "_extra_files")
    if extra is not None and (type(extra) is not dict or not all(type(name) is str for name in extra)):
        return "_extra_files is no plain dict of names"
    return None


LOAD = Loader(
    name="torch.jit.load",
    target="f",
    fills="_extra_files",
    libraries=("torch",),
    archive=True,
    changes_process=False,
    refuse=first(open_file, _arguments),
)


def _patch(patches: PatchSet, module: ModuleType) -> None:
    """`torch.jit.load` is a second name of `torch.jit._serialization.load`."""
    serialization = sys.modules["torch.jit._serialization"]
    wrap_twins(patches, serialization, "load", LOAD, module)


HOOKS = (("torch.jit", _patch),)
