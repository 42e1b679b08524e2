# SPDX-License-Identifier: MIT
"""Reasons not to cache a call that several libraries share, and the shape of a patch table."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from overmind.loader import BoundCall, Loader
from overmind.patching import PatchSet

_TRUE = {"1", "y", "yes", "true", "on", "t"}

Refusal = Callable[[BoundCall], "str | None"]


def first(*refusals: Refusal) -> Refusal:
    """The first reason that any of `refusals` gives."""

    def refuse(call: BoundCall) -> str | None:
        for refusal in refusals:
            reason = refusal(call)
            if reason is not None:
                return reason
        return None

    return refuse


def wrap_all(*targets: tuple[str, Loader]) -> Callable[[PatchSet, ModuleType], None]:
    """A hook that wraps each (path in the module, loader)."""

    def patch(patches: PatchSet, module: ModuleType) -> None:
        for path, loader in targets:
            patches.wrap(module, path, loader)

    return patch


def wrap_twins(patches: PatchSet, home: ModuleType, name: str, loader: Loader, other: ModuleType) -> None:
    """Wraps `name` of `home`, and gives what comes of it to `other`, which has the same function under this name."""
    before = vars(home).get(name)
    patches.wrap(home, name, loader)
    patches.share(other, name, before, vars(home).get(name))


def given(call: BoundCall, name: str) -> Any:
    """The argument `name`, or None."""
    return call.arguments.get(name)


def without(arguments: Mapping[str, str]) -> Refusal:
    """Refuses a call that is given one of these arguments (None and False are not given), with its reason."""

    def refuse(call: BoundCall) -> str | None:
        for name, reason in arguments.items():
            value = given(call, name)
            if value is not None and value is not False:
                return reason
        return None

    return refuse


def open_file(call: BoundCall) -> str | None:
    """Refuses a call that is not given its file `f` by a path."""
    file = given(call, "f")
    if isinstance(file, (str, os.PathLike)):
        return None
    return f"it reads from a {type(file).__name__}, whose content and position belong to the caller"


def remote_code(call: BoundCall) -> str | None:
    """Code of a repository: its classes exist in no other process until that one has run it too."""
    if given(call, "trust_remote_code"):
        return "trust_remote_code=True: classes that come with a repository are not cached yet"
    return None


def download(call: BoundCall) -> str | None:
    """The user asked for the network."""
    if given(call, "force_download"):
        return "force_download=True asks for a fresh download"
    return None


# Quantisation methods whose results come back exactly (tests/parity/test_quantised.py).
_METHODS = ("bitsandbytes", "gguf", "torchao")


def quantised(call: BoundCall) -> str | None:
    """Quantised results hold objects of their own libraries: only those that were tested."""
    for name in ("load_in_8bit", "load_in_4bit"):
        if given(call, name):
            return f"{name} is given: use quantization_config, whose content is compared"
    config = given(call, "quantization_config")
    for method in _methods(config):
        if method not in _METHODS:
            return f"quantisation by {method} is not tested"
    return None


def _methods(config: Any) -> list[str]:
    """The quantisation methods that a `quantization_config` of a model or of a pipeline's parts names."""
    if config is None:
        return []
    mapping = getattr(config, "quant_mapping", None)
    if isinstance(mapping, dict) and mapping:
        return [method for part in mapping.values() for method in _methods(part)]
    backend = getattr(config, "quant_backend", None)
    if isinstance(backend, str):
        return ["bitsandbytes" if backend.startswith("bitsandbytes") else backend]
    if isinstance(config, dict):
        bits = config.get("load_in_4bit") or config.get("load_in_8bit")
        return [_plain(config.get("quant_method", "bitsandbytes" if bits else "an unnamed method"))]
    return [_plain(getattr(config, "quant_method", type(config).__qualname__))]


def _plain(method: object) -> str:
    return str(getattr(method, "value", method))


def devices(call: BoundCall) -> str | None:
    """Anything but the CPU, and placements that depend on the memory that is free just now."""
    device_map = given(call, "device_map")
    if device_map is None:
        return None
    places = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    if "disk" in (str(place) for place in places):
        return "device_map offloads to disk: the result depends on files that it does not own"
    if all(_is_cpu(place) for place in places):
        return None
    return f"device_map={device_map!r}: devices other than the CPU are not tested"


def _is_cpu(place: object) -> bool:
    return not isinstance(place, (int, bool)) and str(place) == "cpu"


def distributed(_call: BoundCall) -> str | None:
    """Each rank loads its own part."""
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        return "torch.distributed is initialised: each rank may load something else"
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        return "WORLD_SIZE is set: each rank may load something else"
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        if os.environ.get(name, "").lower() in _TRUE:
            return f"{name} is set: weights are placed by a launcher"
    return None


def second_repository(*names: str) -> Refusal:
    """An argument that names another repository on the hub: only the target's is resolved to a commit."""

    def refuse(call: BoundCall) -> str | None:
        for name in names:
            value = given(call, name)
            paths = value if isinstance(value, (list, tuple)) else (value,)
            for path in paths:
                if isinstance(path, (str, os.PathLike)) and not os.path.exists(path):
                    return f"{name}={str(path)!r} is a second repository on the hub"
        return None

    return refuse


def adapter(call: BoundCall) -> str | None:
    """A folder that is a PEFT adapter: the base model it names is another repository."""
    if given(call, "adapter_kwargs"):
        return "adapter_kwargs is given: PEFT adapters are not cached yet"
    target = given(call, call.loader.target)
    if not isinstance(target, (str, os.PathLike)):
        return None
    config = os.path.join(os.fspath(target), str(given(call, "subfolder") or ""), "adapter_config.json")
    try:
        with open(config, "rb") as file:
            base = str(json.load(file).get("base_model_name_or_path") or "")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{config} can't be read ({type(error).__name__}): the native load decides"
    if base and not os.path.exists(base):
        return f"it is an adapter for {base!r}, a second repository on the hub"
    return None


def named(value: object) -> str:
    """The name of a class, a function or a partial of one, as part of a key.

    Any other callable is told by its repr; if that holds an address, its key is found by no other process.
    """
    if isinstance(value, functools.partial):
        keywords = [item for pair in sorted(value.keywords.items()) for item in pair]
        return f"{named(value.func)}({', '.join(_constant(item) for item in (*value.args, *keywords))})"
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', repr(value))}"


def _constant(value: object) -> str:
    return repr(value) if isinstance(value, (str, int, float, bytes, type(None))) else named(value)
