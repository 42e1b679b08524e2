# SPDX-License-Identifier: MIT
"""torch.load: a pickled checkpoint is read and copied storage by storage; a hit maps it."""

from __future__ import annotations

import os
import pickle
import sys
from types import ModuleType
from typing import Any

from overmind.loader import BoundCall, Loader
from overmind.loaders.common import first, given, named, open_file, wrap_twins
from overmind.patching import PatchSet

_FORCE_ON = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORCE_OFF = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def _options() -> Any:
    """torch.utils.serialization.config.load, or None on a torch that has none."""
    config = sys.modules.get("torch.utils.serialization.config")
    return getattr(config, "load", None)


def _arguments(call: BoundCall) -> str | None:
    location = given(call, "map_location")
    if callable(location) and not _is_device(location):
        return "map_location is a function: what it does can't be known from outside"
    if not _on_cpu(location):
        return f"map_location={location!r}: devices other than the CPU are not tested"
    if given(call, "pickle_module") not in (None, pickle):
        return f"pickle_module={named(given(call, 'pickle_module'))} is the caller's own code"
    mmap = given(call, "mmap")
    if getattr(_options(), "mmap", False) if mmap is None else mmap:
        return "mmap=True maps the file itself: the native load reads nothing, and is at its best"
    return _odd_state()


def _is_device(value: object) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == "device"


def _on_cpu(location: object) -> bool:
    if isinstance(location, dict):
        return all(_on_cpu(place) for place in location.values())
    if location is None:
        return True
    return (isinstance(location, str) or _is_device(location)) and str(location) == "cpu"


def _odd_state() -> str | None:
    """Modes of torch.serialization under which the tensors are not the file's."""
    serialization = sys.modules.get("torch.serialization")
    state = getattr(serialization, "_serialization_tls", None)
    if getattr(state, "skip_data", False) or getattr(state, "materialize_fake_tensors", False):
        return "torch.serialization.skip_data is on"
    if _active_fake_mode():
        return "a fake tensor mode is on"
    return None


def _active_fake_mode() -> bool:
    guards = sys.modules.get("torch._guards")
    active = getattr(guards, "active_fake_mode", None)
    return active is not None and active() is not None


def _ambient(_call: BoundCall) -> object:
    """Everything that torch.load reads besides its arguments and the file (torch 2.13: serialization.py, `load`)."""
    options = _options()
    serialization = sys.modules.get("torch.serialization")
    safe: list[object] = getattr(serialization, "get_safe_globals", list)()
    return {
        "safe_globals": sorted(_safe_name(item) for item in safe),
        "packages": [
            (priority, named(tag), named(restore))
            for priority, tag, restore in getattr(serialization, "_package_registry", [])
        ],
        "endianness": str(getattr(options, "endianness", None)),
        "calculate_offsets": bool(getattr(options, "calculate_storage_offsets", False)),
        "force": (os.environ.get(_FORCE_ON), os.environ.get(_FORCE_OFF)),
    }


def _safe_name(item: object) -> str:
    if isinstance(item, tuple):
        return "=".join(part if isinstance(part, str) else named(part) for part in item)
    return named(item)


LOAD = Loader(
    name="torch.load",
    target="f",
    libraries=("torch",),
    changes_process=False,
    refuse=first(open_file, _arguments),
    ambient=_ambient,
)


def _patch(patches: PatchSet, module: ModuleType) -> None:
    """`torch.load` is a second name of `torch.serialization.load`, and pickle finds it by the first."""
    serialization = sys.modules.get("torch.serialization")
    if serialization is None:
        patches.wrap(module, "load", LOAD)
        return
    wrap_twins(patches, serialization, "load", LOAD, module)


HOOKS = (("torch", _patch),)
