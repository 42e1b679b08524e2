# SPDX-License-Identifier: MIT
"""What a load depends on beside its arguments: versions, environment, log levels, the modes of torch.

A library that isn't imported yet is described as it would be right after its import, so that a load that imports
it itself has one key.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import warnings
from typing import Any

from overmind.encoding import Encoder, Uncacheable

# Libraries that transformers and diffusers look for, and build something else if they find them.
OPTIONAL = (
    "accelerate", "safetensors", "tokenizers", "sentencepiece", "peft", "bitsandbytes", "flash_attn", "kernels",
    "numpy", "huggingface_hub", "gguf", "xformers", "timm", "torchvision", "optimum", "quanto", "torchao",
)  # fmt: skip
_HUGGING = {"transformers", "diffusers", "sentence_transformers", "peft"}

_PREFIXES = tuple(
    prefix.encode()
    for prefix in (
        "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "SAFETENSORS_", "TORCH_", "PYTORCH_", "ACCELERATE_",
        "BITSANDBYTES", "BNB_", "XDG_CACHE_HOME", "FSDP_", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_", "USE_TF", "USE_TORCH",
        "USE_FLAX", "WORLD_SIZE", "LOCAL_RANK", "RANK", "DISABLE_SAFETENSORS_CONVERSION", "SENTENCE_TRANSFORMERS_",
    )
)  # fmt: skip
_EXACT = (b"HOME",)


def write(encoder: Encoder, libraries: frozenset[str]) -> str:
    """Writes all of it and returns torch's modes. Uncacheable where one is active that Overmind does not know."""
    names = _names(libraries)
    encoder.text(_versions(names))
    encoder.text(_levels(names))
    encoder.text(_blanket_filter())
    encoder.raw(b"v", _environment())
    modes = torch_state()
    encoder.text(modes)
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and vars(deepspeed).get("_hf_deepspeed_config_weak_ref") is not None:
        raise Uncacheable("a DeepSpeed configuration is active")
    return modes


def warm() -> None:
    """Fills the caches that do not change: what is installed, the environment, what torch imports when asked."""
    _distributions()
    _environment()
    torch_state()


@functools.lru_cache(256)
def _names(libraries: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(libraries.union(OPTIONAL) if _HUGGING & libraries else libraries))


_version_lines: dict[tuple[str, ...], tuple[tuple[Any, ...], str]] = {}


def _versions(names: tuple[str, ...]) -> str:
    """Made anew only when one of the modules was imported, or replaced, since."""
    present = tuple(map(sys.modules.get, names))
    known = _version_lines.get(names)
    if known is None or any(old is not new for old, new in zip(known[0], present, strict=True)):
        known = (present, sys.version + "".join(f" {name}={version(name)}" for name in names))
        if len(_version_lines) > 256:
            _version_lines.clear()
        _version_lines[names] = known
    return known[1]


def _levels(names: tuple[str, ...]) -> str:
    """A record below its logger's level is never made, so it can't be kept for those who would see it."""
    manager = logging.root.manager
    root = logging.root.level
    found = [f"{manager.disable} {root}"]
    for name in names:
        logger = manager.loggerDict.get(name)
        if isinstance(logger, logging.Logger) and (logger.disabled or logger.level not in (0, root)):
            found.append(f"{name}:{logger.level}:{logger.disabled}")
    return " ".join(found)


def version(name: str) -> str:
    """The version of an import name: of the code that runs here if it is imported, else of what is installed."""
    module = sys.modules.get(name)
    if module is not None:
        found = vars(module).get("__version__")
        if isinstance(found, str):
            return str(found)
    return _installed_version(name)


def _installed_version(name: str) -> str:
    return _distributions().get(_DISTRIBUTIONS.get(name, name).lower(), "absent")


@functools.cache
def _distributions() -> dict[str, str]:
    """What is installed, by the names of metadata folders: 2 ms; importlib.metadata takes 1 ms for each package."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in names:
            if entry.endswith((".dist-info", ".egg-info")):
                name, _, version = entry[: -len(".dist-info")].partition("-")
                found.setdefault(re.sub(r"[-_.]+", "_", name).lower(), version)
    return found


_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit_learn", "cv2": "opencv_python", "google.protobuf": "protobuf"}


def _blanket_filter() -> str:
    """The first filter that speaks of every warning: a load that was silenced as a whole has no messages to keep."""
    for action, message, category, module, lineno in warnings.filters:
        if message is None and module is None and lineno == 0 and category is Warning:
            return str(action)
    return ""


_last_environment: tuple[dict[Any, Any], bytes] = ({}, b"")


def _environment() -> bytes:
    """The variables that loaders read. Made anew only after a change: comparing takes 2 us, making it 60."""
    global _last_environment
    data = getattr(os.environ, "_data", None)
    if type(data) is not dict:
        data = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    before, line = _last_environment
    if not before or before != data:
        copy = dict(data)
        found = sorted(name for name in copy if name.startswith(_PREFIXES) or name in _EXACT)
        line = b"".join(b"%d:%b%d:%b" % (len(name), name, len(copy[name]), copy[name]) for name in found)
        _last_environment = (copy, line)
    return line


def torch_state() -> str:
    """What differs from a torch that was just imported, of the modes that a loader may see; empty without torch.

    Uncacheable for a mode that Overmind does not know, or under which nothing may be cached.
    """
    torch = sys.modules.get("torch")
    if torch is None or "__future__" not in vars(torch):  # absent, or still being imported by another thread
        return ""
    _refuse_unknown(torch)
    found: list[tuple[str, Any, Any]] = [("device", _device(torch), None)]
    found += [(name, vars(torch)[name](), default) for name, default in _SWITCHES]
    future = torch.__future__
    found.append(("overwrite", future.get_overwrite_module_params_on_conversion(), False))
    found.append(("swap", future.get_swap_module_params_on_conversion(), False))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            found.append((f"autocast {kind}", torch.get_autocast_dtype(kind), None))
    found += _serialization()
    return " ".join(f"{name}={value}" for name, value, default in found if str(value) != str(default))


_SWITCHES: tuple[tuple[str, Any], ...] = (
    ("get_default_dtype", "torch.float32"),
    ("is_inference_mode_enabled", False),
    ("is_grad_enabled", True),
    ("are_deterministic_algorithms_enabled", False),
    ("is_deterministic_algorithms_warn_only_enabled", False),
    ("get_float32_matmul_precision", "highest"),
)


def _device(torch: Any) -> Any:
    """The device that a torch.device context or set_default_device() gives to new tensors."""
    modes = torch.overrides._get_current_function_mode_stack()
    device = None
    for mode in modes:
        kind = type(mode)
        if kind.__name__ != "DeviceContext" or kind.__module__ != "torch.utils._device":
            raise Uncacheable(f"a torch function mode is active ({kind.__qualname__})")
        device = mode.device
        if device.type == "meta":
            raise Uncacheable("it is called under torch.device('meta')")
    return device


def _refuse_unknown(torch: Any) -> None:
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    modes = dispatch._get_current_dispatch_mode_stack() if dispatch is not None else ()
    if modes:
        raise Uncacheable(f"a torch dispatch mode is active ({type(modes[0]).__qualname__})")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Uncacheable("it is called inside a torch.func transform")
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.jit.is_scripting():
        raise Uncacheable("it is called while torch traces or compiles")
    # Asking torch for it would import it: 0.1 s at the first load of a process. An export has imported it.
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise Uncacheable("it is called during an ONNX export")
    module = torch.nn.Module
    for name in ("register_parameter", "register_buffer", "__setattr__", "_apply", "to", "load_state_dict"):
        function = vars(module).get(name)
        if getattr(function, "__globals__", {}).get("__name__") != "torch.nn.modules.module":
            raise Uncacheable(f"torch.nn.Module.{name} is replaced (accelerate's init_empty_weights does that)")
    registrations = sys.modules["torch.nn.modules.module"]
    for name in ("parameter", "buffer", "module"):
        if getattr(registrations, f"_global_{name}_registration_hooks", None):
            raise Uncacheable(f"a global {name} registration hook is active in torch")


def skipped_by_caller() -> str | None:
    """The context of transformers in which weights are not initialised, or not tied; None outside of one.

    It exchanges functions of the whole process: another thread's load of a model may be where it is from.
    """
    torch, transformers = sys.modules.get("torch"), sys.modules.get("transformers.modeling_utils")
    if torch is None or transformers is None:
        return None
    model = getattr(transformers, "PreTrainedModel", None)
    for holder, name in (
        (sys.modules.get("torch.nn.init"), "normal_"),
        (model, "init_weights"),
        (model, "tie_weights"),
    ):
        function = getattr(holder, name, None)
        context, local, _ = getattr(function, "__qualname__", "").partition(".<locals>.")
        if local and context.startswith("no_") and (function.__module__ or "").startswith("transformers."):
            return context
    return None


def _serialization() -> list[tuple[str, Any, Any]]:
    tls = getattr(sys.modules.get("torch.serialization"), "_serialization_tls", None)
    found: list[tuple[str, Any, Any]] = [
        (name, getattr(tls, name, default), default) for name, default in _SERIALIZATION_DEFAULTS
    ]
    config = sys.modules.get("torch.utils.serialization.config")
    load = getattr(config, "load", None)
    if load is None:
        return found  # torch.serialization imports it when a setting is first read or set
    serialization = sys.modules["torch.serialization"]
    found.append(("endianness", serialization.get_default_load_endianness(), None))
    found.append(("mmap", load.mmap, False))
    found.append(("offsets", load.calculate_storage_offsets, False))
    private = getattr(sys.modules.get("mmap"), "MAP_PRIVATE", 2)
    options = serialization.get_default_mmap_options()
    found.append(("mmap options", private if options is None else options, private))
    return found


_SERIALIZATION_DEFAULTS = (("map_location", None), ("skip_data", False), ("materialize_fake_tensors", False))
