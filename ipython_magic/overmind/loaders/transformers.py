# SPDX-License-Identifier: MIT
"""transformers: models, Auto classes, tokenizers, processors, configs, pipeline().

`from_pretrained` is wrapped where a class defines it. Most subclasses that override it (transformers 5.24: Csm, Qwen2.5
Omni, Bark and Wav2Vec2 processors, ...) end in `super()`, and hit there. The Auto model classes each hold
a copy of the base's function, so each is wrapped by itself. Read with 5.24; a name that another version does not
have is skipped.
"""

from __future__ import annotations

import sys
from types import ModuleType

from overmind.loader import BoundCall, Loader
from overmind.loaders.common import (
    adapter,
    devices,
    distributed,
    download,
    first,
    given,
    named,
    quantised,
    remote_code,
    second_repository,
    without,
    wrap_all,
    wrap_twins,
)
from overmind.patching import PatchSet

_TARGET = "pretrained_model_name_or_path"
_LIBRARIES = ("transformers", "torch", "tokenizers", "safetensors", "huggingface_hub")
# What is installed changes what is built: PEFT injects adapters, accelerate places weights, and so on.
_MODEL_LIBRARIES = (*_LIBRARIES, "accelerate", "peft", "kernels")
_PROCESSOR_LIBRARIES = (*_LIBRARIES, "sentencepiece", "numpy", "PIL", "torchvision")

# Arguments under which the weights, or where they go, are not a function of the files.
_UNCACHED = {
    "state_dict": "state_dict is given: the weights are the caller's, not a file's",
    "distributed_config": "distributed_config is given: each rank loads its own part",
    "device_mesh": "device_mesh is given: each rank loads its own part",
    "tp_plan": "tp_plan is given: each rank loads its own part",
    "tp_size": "tp_size is given: each rank loads its own part",
    "fusion_config": "fusion_config changes classes of the whole process",
    "use_kernels": "use_kernels changes classes of the whole process",
    "kernel_config": "kernel_config changes classes of the whole process",
    "offload_folder": "offload_folder is given: the result depends on files that it does not own",
}


_arguments = without(_UNCACHED)


def _changed_process(_call: BoundCall) -> str | None:
    """Registries by which a user changes what a load builds; empty unless somebody filled them."""
    conversions = getattr(sys.modules.get("transformers.conversion_mapping"), "USER_REGISTERED_MAPPINGS", None)
    if conversions:
        return "weight conversions were registered in this process"
    if getattr(sys.modules.get("transformers.monkey_patching"), "_monkey_patch_mapping_cache", None):
        return "class replacements were registered with transformers in this process"
    if getattr(sys.modules.get("transformers.modeling_utils"), "_is_ds_init_called", False):
        return "it is called inside deepspeed.zero.Init"
    zero3 = getattr(sys.modules.get("transformers.integrations.deepspeed"), "is_deepspeed_zero3_enabled", None)
    if zero3 is not None and zero3():
        return "DeepSpeed ZeRO-3 places the weights"
    return None


_MAPPINGS = {  # modules of the Auto classes and the tables that `AutoX.register` adds to
    "configuration_auto": ("CONFIG_MAPPING",),
    "tokenization_auto": ("TOKENIZER_MAPPING", "REGISTERED_TOKENIZER_CLASSES", "REGISTERED_FAST_ALIASES"),
    "processing_auto": ("PROCESSOR_MAPPING",),
    "image_processing_auto": ("IMAGE_PROCESSOR_MAPPING",),
    "feature_extraction_auto": ("FEATURE_EXTRACTOR_MAPPING",),
    "video_processing_auto": ("VIDEO_PROCESSOR_MAPPING",),
}


def _registered(_call: BoundCall) -> object:
    """Classes that the user added to the Auto tables (in a fresh process: none)."""
    found: list[tuple[str, str, str]] = []
    for module_name, names in _MAPPINGS.items():
        module = sys.modules.get(f"transformers.models.auto.{module_name}")
        for name in names if module is not None else ():
            found += _additions(name, getattr(module, name, None))
    modeling = sys.modules.get("transformers.models.auto.modeling_auto")
    for name, value in vars(modeling).items() if modeling is not None else ():
        if name.startswith("MODEL") and name.endswith("_MAPPING"):
            found += _additions(name, value)
    return sorted(found)


def _additions(name: str, mapping: object) -> list[tuple[str, str, str]]:
    extra = mapping if type(mapping) is dict else getattr(mapping, "_extra_content", {})
    return [(name, key if isinstance(key, str) else named(key), _names(value)) for key, value in extra.items()]


def _names(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(_names(part) for part in value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{_names(part)}" for key, part in sorted(value.items()))
    return named(value)


_COMMON = first(distributed, download, remote_code)
_MODEL_REFUSAL = first(
    _COMMON, _arguments, quantised, devices, adapter, _changed_process, second_repository("config", "generation_config")
)


def _loader(name: str, libraries: tuple[str, ...] = _LIBRARIES, target: str = _TARGET) -> Loader:
    return Loader(
        name=f"transformers.{name}.from_pretrained",
        target=target,
        hub=True,
        libraries=libraries,
        changes_process=False,
        refuse=first(_COMMON, second_repository("config")),
        ambient=_registered,
    )


def _model_loader(name: str) -> Loader:
    return Loader(
        name=f"transformers.{name}.from_pretrained",
        target=_TARGET,
        hub=True,
        libraries=_MODEL_LIBRARIES,
        refuse=_MODEL_REFUSAL,
        ambient=_registered,
    )


_PIPELINE_PARTS = ("tokenizer", "feature_extractor", "image_processor", "video_processor", "processor", "config")


def _pipeline_arguments(call: BoundCall) -> str | None:
    if not isinstance(given(call, "model"), str):
        return "pipeline() round a model that is loaded already has nothing to load"
    if given(call, "task") is None:
        return "without a task, pipeline() asks the hub for one"
    device = given(call, "device")
    if device is not None and (isinstance(device, int) or str(device) != "cpu") and device != -1:
        return f"device={device!r}: devices other than the CPU are not tested"
    if given(call, "pipeline_class") is not None:
        return "pipeline_class is the caller's own code"
    return _nested_arguments(call)


def _nested_arguments(call: BoundCall) -> str | None:
    """`model_kwargs` go on to the model's `from_pretrained`: the same rules hold for them."""
    inner = given(call, "model_kwargs")
    if not isinstance(inner, dict):
        return None
    arguments = {**inner, call.loader.target: given(call, "model")}
    return _MODEL_REFUSAL(BoundCall(call.loader, call.function, (), inner, None, arguments))


PIPELINE = Loader(
    name="transformers.pipeline",
    target="model",
    hub=True,
    libraries=tuple(dict.fromkeys(_MODEL_LIBRARIES + _PROCESSOR_LIBRARIES)),
    refuse=first(_pipeline_arguments, second_repository(*_PIPELINE_PARTS), _MODEL_REFUSAL),
    ambient=_registered,
)


def _patch_auto_models(patches: PatchSet, module: ModuleType) -> None:
    base = vars(module).get("_BaseAutoModelClass")
    if not isinstance(base, type):
        return
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and issubclass(value, base) and "from_pretrained" in vars(value):
            patches.wrap(module, f"{name}.from_pretrained", _model_loader(name))


def _patch_pipeline(patches: PatchSet, module: ModuleType) -> None:
    """The lazy package keeps a copy of `pipeline` once somebody asked for it. transformers 5 executes its package twice
    while it imports itself; a copy in the first module, which sys.modules does not have, stays native, and what it
    loads inside is served."""
    wrap_twins(patches, module, "pipeline", PIPELINE, sys.modules["transformers"])


def _patch_config(patches: PatchSet, module: ModuleType) -> None:
    """The class was called PretrainedConfig before transformers 5; both names are one class there."""
    name = "PreTrainedConfig" if "PreTrainedConfig" in vars(module) else "PretrainedConfig"
    patches.wrap(module, f"{name}.from_pretrained", _loader("PreTrainedConfig"))


def _one(module: str, name: str, libraries: tuple[str, ...] = _LIBRARIES, target: str = _TARGET):  # type: ignore[no-untyped-def]
    return f"transformers.{module}", wrap_all((f"{name}.from_pretrained", _loader(name, libraries, target)))


_AUTO = "models.auto"
HOOKS = (
    ("transformers.modeling_utils", wrap_all(("PreTrainedModel.from_pretrained", _model_loader("PreTrainedModel")))),
    (f"transformers.{_AUTO}.modeling_auto", _patch_auto_models),
    ("transformers.configuration_utils", _patch_config),
    _one("generation.configuration_utils", "GenerationConfig", target="pretrained_model_name"),
    _one(f"{_AUTO}.configuration_auto", "AutoConfig"),
    _one("tokenization_utils_base", "PreTrainedTokenizerBase", _PROCESSOR_LIBRARIES),
    _one(f"{_AUTO}.tokenization_auto", "AutoTokenizer", _PROCESSOR_LIBRARIES),
    _one("processing_utils", "ProcessorMixin", _PROCESSOR_LIBRARIES),
    _one(f"{_AUTO}.processing_auto", "AutoProcessor", _PROCESSOR_LIBRARIES),
    _one("image_processing_base", "ImageProcessingMixin", _PROCESSOR_LIBRARIES),
    _one(f"{_AUTO}.image_processing_auto", "AutoImageProcessor", _PROCESSOR_LIBRARIES),
    _one("feature_extraction_utils", "FeatureExtractionMixin", _PROCESSOR_LIBRARIES),
    _one(f"{_AUTO}.feature_extraction_auto", "AutoFeatureExtractor", _PROCESSOR_LIBRARIES),
    _one("video_processing_utils", "VideoProcessorMixin", _PROCESSOR_LIBRARIES),
    _one(f"{_AUTO}.video_processing_auto", "AutoVideoProcessor", _PROCESSOR_LIBRARIES),
    ("transformers.pipelines", _patch_pipeline),
)
