# SPDX-License-Identifier: MIT
"""diffusers: models, pipelines, schedulers, single files.

A pipeline takes modules that the caller loaded before (`vae=vae`) and puts them into the result as they are; that is
`embeds_modules`. Classes that override `from_pretrained` and are not listed (diffusers 0.42: AutoModel,
LegacyModelMixin, MultiControlNetModel, MultiAdapter) read a config and end in ModelMixin's, where they hit.
"""

from __future__ import annotations

import sys
from types import ModuleType

from overmind.loader import BoundCall, Loader
from overmind.loaders.common import (
    devices,
    distributed,
    download,
    first,
    given,
    quantised,
    remote_code,
    second_repository,
    without,
    wrap_all,
)
from overmind.patching import PatchSet

_LIBRARIES = ("diffusers", "torch", "safetensors", "huggingface_hub", "accelerate", "peft")
_PIPELINE_LIBRARIES = (*_LIBRARIES, "transformers", "tokenizers", "numpy", "PIL", "scipy")

_UNCACHED = {
    "parallel_config": "parallel_config is given: each rank loads its own part",
    "custom_pipeline": "custom_pipeline: classes that come with a repository are not cached yet",
    "provider": "ONNX sessions live outside Python",
    "sess_options": "ONNX sessions live outside Python",
    "use_onnx": "ONNX sessions live outside Python",
    "use_flashpack": "use_flashpack places weights by itself",
    "load_connected_pipeline": "load_connected_pipeline reads a second repository",
    "offload_folder": "offload_folder is given: the result depends on files that it does not own",
    "state_dict": "state_dict is given: the weights are the caller's, not a file's",
}


_arguments = without(_UNCACHED)


def _in_memory(call: BoundCall) -> str | None:
    target = given(call, call.loader.target)
    if isinstance(target, dict):
        return "the weights are given as a dict, not as a file"
    if isinstance(target, str) and target.startswith(("http://", "https://", "hf.co/", "huggingface.co/")):
        return "the target is a link: what it points to can't be seen from here"
    return None


def _ambient(_call: BoundCall) -> object:
    """Switches that diffusers reads once, when it is imported: the environment may have changed since."""
    constants = sys.modules.get("diffusers.utils.constants")
    names = ("DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_ATTN_CHECKS", "HF_ENABLE_PARALLEL_LOADING", "USE_PEFT_BACKEND")
    models = sys.modules.get("diffusers.models.modeling_utils")
    switches = [(name, str(getattr(constants, name, None))) for name in names]
    return [*switches, ("low_cpu_mem_usage", str(getattr(models, "_LOW_CPU_MEM_USAGE_DEFAULT", None)))]


# A PipelineQuantizationConfig notes here, and never reads, which part got which config.
_FILLED = "quantization_config.config_mapping"
_REFUSAL = first(distributed, download, remote_code, _arguments, quantised, devices)


def _loader(name: str, target: str = "pretrained_model_name_or_path", pipeline: bool = False) -> Loader:
    return Loader(
        name=f"diffusers.{name}",
        target=target,
        hub=True,
        embeds_modules=pipeline,
        fills=_FILLED if pipeline else "",
        libraries=_PIPELINE_LIBRARIES if pipeline else _LIBRARIES,
        refuse=_REFUSAL,
        ambient=_ambient,
    )


def _single_file(name: str, target: str, pipeline: bool) -> Loader:
    """The file is one path; `config` may be a repository, and without it diffusers goes to the hub for one."""
    return Loader(
        name=f"diffusers.{name}.from_single_file",
        target=target,
        embeds_modules=pipeline,
        libraries=_PIPELINE_LIBRARIES,
        refuse=first(_REFUSAL, _in_memory, _single_file_config, second_repository("config", "original_config")),
        ambient=_ambient,
    )


def _single_file_config(call: BoundCall) -> str | None:
    names = ("config",) if call.loader.embeds_modules else ("config", "original_config")
    if all(given(call, name) is None for name in names):
        return "without config= its configuration comes from a second repository on the hub"
    return None


def _patch_auto_pipelines(patches: PatchSet, module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        if name.startswith("AutoPipelineFor") and isinstance(value, type) and "from_pretrained" in vars(value):
            loader = _loader(f"{name}.from_pretrained", "pretrained_model_or_path", pipeline=True)
            patches.wrap(module, f"{name}.from_pretrained", loader)


_PIPELINE_FILE = _single_file("DiffusionPipeline", "pretrained_model_link_or_path", pipeline=True)
_MODEL_FILE = _single_file("ModelMixin", "pretrained_model_link_or_path_or_dict", pipeline=False)

HOOKS = (
    (
        "diffusers.models.modeling_utils",
        wrap_all(("ModelMixin.from_pretrained", _loader("ModelMixin.from_pretrained"))),
    ),
    (
        "diffusers.pipelines.pipeline_utils",
        wrap_all(("DiffusionPipeline.from_pretrained", _loader("DiffusionPipeline.from_pretrained", pipeline=True))),
    ),
    ("diffusers.pipelines.auto_pipeline", _patch_auto_pipelines),
    (
        "diffusers.schedulers.scheduling_utils",
        wrap_all(("SchedulerMixin.from_pretrained", _loader("SchedulerMixin.from_pretrained"))),
    ),
    ("diffusers.loaders.single_file", wrap_all(("FromSingleFileMixin.from_single_file", _PIPELINE_FILE))),
    ("diffusers.loaders.single_file_model", wrap_all(("FromOriginalModelMixin.from_single_file", _MODEL_FILE))),
)
