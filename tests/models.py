# SPDX-License-Identifier: MIT
"""Models with real shapes and random weights, made on the spot: nothing is downloaded.

`folder("llama")` returns a folder that `from_pretrained` accepts, and makes it first if it isn't there. The weights
come from a fixed seed, so two machines hold the same bytes. A model is written to a temporary folder and renamed, so
a folder that exists is complete, however often the maker was interrupted, and parallel makers don't meet.

    python tests/models.py --out build/models              every full-size model (10.6 GB, 80 s on two cores)
    python tests/models.py --out build/models tiny_llama   only this one
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import string
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import vocabulary

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "models"
# Raise it when a recipe below changes: folders made by another recipe are made anew.
RECIPE = "1"
_TICK = 0.02  # seconds, as overmind.modules.TICK_NS, which is not imported here: models are made before it is built

MAKERS: dict[str, Callable[[Path], None]] = {}


def maker(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a function that writes the model `name` into an empty folder."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        MAKERS[name] = function
        return function

    return register


def folder(name: str, cache: str | os.PathLike[str] = CACHE) -> Path:
    """The folder of model `name` under `cache`, made first if needed. KeyError for a name that has no recipe."""
    make = MAKERS[name]
    target = Path(cache).resolve() / name
    if _complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        make(temporary)
        (temporary / ".recipe").write_text(RECIPE)
        temporary.chmod(0o755)
        _move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _wait_until_older_than_a_tick(target)
    return target


def _wait_until_older_than_a_tick(target: Path) -> None:
    """A load of what was written in the same tick of the file system's clock is never kept."""
    while time.time() - target.stat().st_ctime < 2 * _TICK:
        time.sleep(_TICK)


def _complete(target: Path) -> bool:
    try:
        return (target / ".recipe").read_text() == RECIPE
    except FileNotFoundError:
        return False


def _move_into_place(temporary: Path, target: Path) -> None:
    if target.exists() and not _complete(target):
        shutil.rmtree(target)
    try:
        temporary.rename(target)
    except OSError:
        # Another process was faster; its bytes are the same.
        if not _complete(target):
            raise


# --- weights -------------------------------------------------------------------------------------------------------


def _random(name: str, dtype: Any, build: Callable[[], Any]) -> Any:
    """The module that `build` returns, with weights drawn from a seed that depends on `name` only.

    Built on the meta device: the libraries' own initialisation of 860 M parameters takes minutes, this takes seconds.
    Only what `state_dict` holds is filled, because the module is only ever saved.
    """
    import torch

    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            module = build()
    finally:
        torch.set_default_dtype(previous)
    module = module.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            if not tensor.is_floating_point():
                tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype).view_as(tensor))
            elif tensor.dim() > 1:
                tensor.normal_(0.0, 0.02, generator=generator)
            elif key.endswith("bias"):
                tensor.zero_()
            else:
                tensor.fill_(1.0)
    return module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers and diffusers."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [log for log in (transformers_logging, diffusers_logging) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


# --- Stable Diffusion 1.5 ------------------------------------------------------------------------------------------

BIG_CHANNELS = (320, 640, 1280, 1280)


def _text_encoder(name: str, dtype: Any, **config: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    size = config["vocab_size"]
    full = CLIPTextConfig(**config, bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=1)
    return _random(name, dtype, lambda: CLIPTextModel(full))


def _vae(name: str, dtype: Any, channels: tuple[int, ...], size: int, groups: int = 32) -> Any:
    from diffusers import AutoencoderKL

    return _random(
        name,
        dtype,
        lambda: AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            block_out_channels=channels,
            layers_per_block=2 if size > 64 else 1,
            norm_num_groups=groups,
            sample_size=size,
        ),
    )


def _scheduler() -> Any:
    from diffusers import PNDMScheduler

    return PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )


def _save_pipeline(path: Path, unet: Any, vae: Any, text_encoder: Any, tokenizer: Any) -> None:
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    with _quiet():
        pipeline.save_pretrained(path)


@maker("pipeline")
def _make_pipeline(path: Path) -> None:
    import torch
    from diffusers import UNet2DConditionModel

    half = torch.float16
    unet = _random(
        "unet",
        half,
        lambda: UNet2DConditionModel(
            sample_size=64, block_out_channels=BIG_CHANNELS, cross_attention_dim=768, attention_head_dim=8
        ),
    )
    text_encoder = _text_encoder(
        "text_encoder",
        half,
        vocab_size=49_408,
        hidden_size=768,
        intermediate_size=3072,
        projection_dim=768,
        num_hidden_layers=12,
        num_attention_heads=12,
    )
    vae = _vae("pipeline.vae", half, (128, 256, 512, 512), 512)
    _save_pipeline(path, unet, vae, text_encoder, vocabulary.clip_tokenizer(49_408))


def _make_script(path: Path, unet: Any, cross: int) -> None:
    """The UNet as a TorchScript archive, traced on the smallest image that it takes."""
    import warnings

    import torch

    class OneOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet

        def forward(self, sample: Any, timestep: Any, states: Any) -> Any:
            return self.unet(sample, timestep, states, return_dict=False)[0]

    example = (torch.ones(1, 4, 8, 8), torch.tensor(3), torch.ones(1, 5, cross))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(OneOutput(), example, check_trace=False).save(str(path / "unet.pt"))


@maker("script")
def _make_unet_script(path: Path) -> None:
    import torch
    from diffusers import UNet2DConditionModel

    config = {"sample_size": 64, "block_out_channels": BIG_CHANNELS, "cross_attention_dim": 768}
    unet = _random("script", torch.float32, lambda: UNet2DConditionModel(**config, attention_head_dim=8))
    _make_script(path, unet, 768)


@maker("vae")
def _make_vae(path: Path) -> None:
    import torch

    with _quiet():
        _vae("vae", torch.float16, (128, 256, 512, 512), 512).save_pretrained(path)


def _make_controlnet(path: Path, name: str) -> None:
    import torch
    from diffusers import ControlNetModel

    controlnet = _random(
        name,
        torch.float16,
        lambda: ControlNetModel(block_out_channels=BIG_CHANNELS, cross_attention_dim=768, attention_head_dim=8),
    )
    with _quiet():
        controlnet.save_pretrained(path)


@maker("controlnet_a")
def _make_controlnet_a(path: Path) -> None:
    _make_controlnet(path, "controlnet_a")


@maker("controlnet_b")
def _make_controlnet_b(path: Path) -> None:
    _make_controlnet(path, "controlnet_b")


# --- Llama ---------------------------------------------------------------------------------------------------------


def _llama(name: str, **config: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    return _random(name, torch.bfloat16, lambda: LlamaForCausalLM(LlamaConfig(**config)))


def _save_llama(path: Path, name: str, **config: int) -> None:
    with _quiet():
        _llama(name, **config).save_pretrained(path)


@maker("llama")
def _make_llama(path: Path) -> None:
    _save_llama(
        path,
        "llama",
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=4,
    )


def _make_bin(path: Path, source: Path) -> None:
    """The weights of `source` as the pickled checkpoint that older repositories hold."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(source / "model.safetensors"), path / "pytorch_model.bin")
    shutil.copy(source / "config.json", path)


@maker("llama_bin")
def _make_llama_bin(path: Path) -> None:
    _make_bin(path, folder("llama", path.parent))


@maker("tokenizer128k")
def _make_tokenizer128k(path: Path) -> None:
    vocabulary.byte_tokenizer(128_256, 256).save_pretrained(path)


# --- small ones for tests ------------------------------------------------------------------------------------------


@maker("tiny_tokenizer")
def _make_tiny_tokenizer(path: Path) -> None:
    vocabulary.byte_tokenizer(1_000, 4).save_pretrained(path)


@maker("tiny_llama")
def _make_tiny_llama(path: Path) -> None:
    _save_llama(
        path,
        "tiny_llama",
        vocab_size=1_000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    vocabulary.byte_tokenizer(1_000, 4).save_pretrained(path)


@maker("tiny_llama64")
def _make_tiny_llama64(path: Path) -> None:
    """Its rows are whole blocks of 64, as bitsandbytes' own kernel for CPUs with AVX-512 needs them."""
    _save_llama(
        path,
        "tiny_llama64",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@maker("tiny_llama_bin")
def _make_tiny_llama_bin(path: Path) -> None:
    _make_bin(path, folder("tiny_llama", path.parent))


@maker("tiny_bert")
def _make_tiny_bert(path: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = _random("tiny_bert", torch.float32, lambda: BertModel(config))
    with _quiet():
        model.save_pretrained(path)
    numbers = {word: number for number, word in enumerate(words)}
    BertTokenizer(vocab=numbers, model_max_length=512).save_pretrained(path)


@maker("tiny_vae")
def _make_tiny_vae(path: Path) -> None:
    import torch

    with _quiet():
        _vae("tiny_vae", torch.float16, (8, 16), 32, groups=4).save_pretrained(path)


def _tiny_blocks() -> dict[str, Any]:
    return {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }


@maker("tiny_pipeline")
def _make_tiny_pipeline(path: Path) -> None:
    import torch
    from diffusers import UNet2DConditionModel

    half = torch.float16
    up = ("UpBlock2D", "CrossAttnUpBlock2D")
    unet = _random("tiny_unet", half, lambda: UNet2DConditionModel(sample_size=16, up_block_types=up, **_tiny_blocks()))
    text_encoder = _text_encoder(
        "tiny_text_encoder",
        half,
        vocab_size=1_000,
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    vae = _vae("tiny_pipeline.vae", half, (8, 16), 32, groups=4)
    _save_pipeline(path, unet, vae, text_encoder, vocabulary.clip_tokenizer(1_000))


@maker("tiny_script")
def _make_tiny_script(path: Path) -> None:
    import torch
    from diffusers import UNet2DConditionModel

    up = ("UpBlock2D", "CrossAttnUpBlock2D")
    build = lambda: UNet2DConditionModel(sample_size=16, up_block_types=up, **_tiny_blocks())  # noqa: E731
    _make_script(path, _random("tiny_script", torch.float32, build), 16)


def _make_tiny_controlnet(path: Path, name: str) -> None:
    import torch
    from diffusers import ControlNetModel

    controlnet = _random(
        name,
        torch.float16,
        lambda: ControlNetModel(conditioning_embedding_out_channels=(8, 16), **_tiny_blocks()),
    )
    with _quiet():
        controlnet.save_pretrained(path)


@maker("tiny_controlnet_a")
def _make_tiny_controlnet_a(path: Path) -> None:
    _make_tiny_controlnet(path, "tiny_controlnet_a")


@maker("tiny_controlnet_b")
def _make_tiny_controlnet_b(path: Path) -> None:
    _make_tiny_controlnet(path, "tiny_controlnet_b")


def _image_processor() -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


@maker("tiny_image_processor")
def _make_tiny_image_processor(path: Path) -> None:
    _image_processor().save_pretrained(path)


@maker("tiny_feature_extractor")
def _make_tiny_feature_extractor(path: Path) -> None:
    from transformers import Wav2Vec2FeatureExtractor

    Wav2Vec2FeatureExtractor(sampling_rate=8_000).save_pretrained(path)


@maker("tiny_processor")
def _make_tiny_processor(path: Path) -> None:
    from transformers import CLIPProcessor

    CLIPProcessor(image_processor=_image_processor(), tokenizer=vocabulary.clip_tokenizer(1_000)).save_pretrained(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes models with random weights for tests and benchmarks.")
    parser.add_argument("--out", type=Path, default=CACHE, help="cache folder (default: build/models)")
    parser.add_argument("names", nargs="*", help=f"default: every full-size one; of: {', '.join(MAKERS)}")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(MAKERS))
    if unknown:
        parser.error(f"no recipe for {', '.join(unknown)}; there is {', '.join(MAKERS)}")
    made = {}
    for name in options.names or [name for name in MAKERS if not name.startswith("tiny_")]:
        start = time.monotonic()
        made[name] = str(folder(name, options.out))
        print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(made, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
