# SPDX-License-Identifier: MIT
"""diffusers: models, pipelines, schedulers, single files; native against cached."""

from __future__ import annotations

from typing import Any

import pytest
from fresh import Fresh
from parity.cases import Load, compare, fill

MAKE = """
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from parity import single_file
from safetensors.torch import load_file, save_file

weights = "/diffusion_pytorch_model.safetensors"
save_file(load_file(tiny_vae + weights), made + "/vae.safetensors")
torch.save(load_file(tiny_vae + weights), made + "/vae.ckpt")
save_file(load_file(tiny_controlnet_a + weights), made + "/controlnet.safetensors")
single_file.write(tiny_pipeline, made + "/pipeline.safetensors")

vae = AutoencoderKL.from_pretrained(tiny_vae)
vae.save_pretrained(made + "/variant", variant="fp16")
vae.save_pretrained(made + "/pickled", safe_serialization=False)
UNet2DConditionModel.from_pretrained(tiny_pipeline, subfolder="unet").save_pretrained(
    made + "/sharded", max_shard_size="60kB"
)
"""

DECODED = "[m.decode(torch.ones(1, 4, 4, 4, dtype=m.dtype)).sample, saved(m)]"
DENOISED = "[m(torch.ones(1, 4, 8, 8, dtype=m.dtype), 3, torch.ones(1, 5, 16, dtype=m.dtype)).sample, saved(m)]"
CONTROLLED = (
    "[m(torch.ones(1, 4, 8, 8, dtype=m.dtype), 3, torch.ones(1, 5, 16, dtype=m.dtype),"
    " torch.ones(1, 3, 16, 16, dtype=m.dtype), return_dict=False), saved(m)]"
)

MODELS = [
    Load("unet", "diffusers.UNet2DConditionModel.from_pretrained(tiny_pipeline + '/unet')", DENOISED),
    Load("subfolder", "diffusers.UNet2DConditionModel.from_pretrained(tiny_pipeline, subfolder='unet')", DENOISED),
    Load("vae", "diffusers.AutoencoderKL.from_pretrained(tiny_vae)", DECODED),
    Load("controlnet", "diffusers.ControlNetModel.from_pretrained(tiny_controlnet_a)", CONTROLLED),
    Load("auto_model", "diffusers.AutoModel.from_pretrained(tiny_pipeline, subfolder='unet')", DENOISED),
    Load("cast_up", "diffusers.AutoencoderKL.from_pretrained(tiny_vae, torch_dtype=torch.float32)", DECODED),
    Load("cast_over", "diffusers.AutoencoderKL.from_pretrained(tiny_vae, torch_dtype=torch.bfloat16)", DECODED),
    Load("variant", "diffusers.AutoencoderKL.from_pretrained(made + '/variant', variant='fp16')", DECODED),
    Load("pickled", "diffusers.AutoencoderKL.from_pretrained(made + '/pickled', use_safetensors=False)", DECODED),
    Load("sharded", "diffusers.UNet2DConditionModel.from_pretrained(made + '/sharded')", DENOISED),
    Load("words", "diffusers.AutoencoderKL.from_pretrained(tiny_vae, scaling_factor=0.5)", "m.config"),
    Load("loading_info", "diffusers.AutoencoderKL.from_pretrained(tiny_vae, output_loading_info=True)"),
    Load("device_map", "diffusers.AutoencoderKL.from_pretrained(tiny_vae, device_map='cpu')", DECODED),
    Load(
        "not_low_memory",
        "diffusers.AutoencoderKL.from_pretrained(tiny_vae, low_cpu_mem_usage=False)",
        DECODED,
        bypass="without low_cpu_mem_usage diffusers draws random weights and overwrites them",
    ),
]

SEED = "torch.Generator().manual_seed(0)"
PAINT = f"m('a b', num_inference_steps=1, output_type='np', height=16, width=16, generator={SEED}).images"
PAINTED = f"[{PAINT}, saved(m), m.progress_bar is not None]"
FULL = "torch_dtype=torch.float32"

PIPELINES = [
    Load("diffusion", f"diffusers.DiffusionPipeline.from_pretrained(tiny_pipeline, {FULL})", PAINTED),
    Load("as_stored", "diffusers.DiffusionPipeline.from_pretrained(tiny_pipeline)", "saved(m)"),
    Load("own_class", f"diffusers.StableDiffusionPipeline.from_pretrained(tiny_pipeline, {FULL})", "saved(m)"),
    Load("auto_text", f"diffusers.AutoPipelineForText2Image.from_pretrained(tiny_pipeline, {FULL})", "saved(m)"),
    Load("auto_image", f"diffusers.AutoPipelineForImage2Image.from_pretrained(tiny_pipeline, {FULL})", "saved(m)"),
    Load("other_class", "diffusers.StableDiffusionImg2ImgPipeline.from_pretrained(tiny_pipeline)", "saved(m)"),
    Load("dtype_map", "diffusers.DiffusionPipeline.from_pretrained(tiny_pipeline, torch_dtype=dtypes)", "saved(m)",
         "dtypes = {'unet': torch.float32, 'default': torch.float16}"),
    Load("no_part", "diffusers.DiffusionPipeline.from_pretrained(tiny_pipeline, vae=None)", "[m.vae, m.config]"),
]  # fmt: skip

STEP = (
    "[m.set_timesteps(4), m.timesteps,"
    " m.step(torch.ones(1, 4, 8, 8), m.timesteps[0], torch.zeros(1, 4, 8, 8)).prev_sample, saved(m)]"
)

SCHEDULERS = [
    Load(f"{kind}_{form}", f"diffusers.{kind}Scheduler.from_pretrained({where})", STEP)
    for kind, form, where in [
        ("PNDM", "subfolder", "tiny_pipeline, subfolder='scheduler'"),
        ("DDIM", "folder", "tiny_pipeline + '/scheduler'"),
        ("EulerDiscrete", "words", "tiny_pipeline, subfolder='scheduler', timestep_spacing='trailing'"),
        ("DPMSolverMultistep", "info", "tiny_pipeline, subfolder='scheduler', return_unused_kwargs=False"),
    ]
]

SINGLE = [
    Load("vae", "diffusers.AutoencoderKL.from_single_file(made + '/vae.safetensors', config=tiny_vae)", DECODED),
    Load(
        "vae_cast",
        f"diffusers.AutoencoderKL.from_single_file(made + '/vae.safetensors', config=tiny_vae, {FULL})",
        DECODED,
    ),
    Load("vae_pickled", "diffusers.AutoencoderKL.from_single_file(made + '/vae.ckpt', config=tiny_vae)", DECODED),
    Load(
        "controlnet",
        "diffusers.ControlNetModel.from_single_file(made + '/controlnet.safetensors', config=tiny_controlnet_a)",
        CONTROLLED,
    ),
    Load(
        "pipeline",
        "diffusers.StableDiffusionPipeline.from_single_file(made + '/pipeline.safetensors', config=tiny_pipeline,"
        f" {FULL})",
        f"[{PAINT}, saved(m), differing]",
        # The converted weights are the folder's, or this file tests the wrong thing.
        "from safetensors.torch import load_file\n"
        "folder = diffusers.StableDiffusionPipeline.from_pretrained(tiny_pipeline, torch_dtype=torch.float32)\n"
        "single = diffusers.StableDiffusionPipeline.from_single_file(\n"
        "    made + '/pipeline.safetensors', config=tiny_pipeline, torch_dtype=torch.float32)\n"
        "pairs = [(a.state_dict(), b.state_dict()) for a, b in\n"
        "         [(folder.unet, single.unet), (folder.vae, single.vae), (folder.text_encoder, single.text_encoder)]]\n"
        "differing = [k for a, b in pairs for k in a.keys() | b.keys()\n"
        "             if not torch.equal(a[k].squeeze(), b[k].squeeze())]\n"
        "assert not differing, differing",
    ),
]

TABLES = {"model": MODELS, "pipeline": PIPELINES, "scheduler": SCHEDULERS, "single_file": SINGLE}
ROWS = [pytest.param(load, id=f"{table}-{load.name}") for table, loads in TABLES.items() for load in loads]


@pytest.fixture(scope="module")
def made(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> str:
    return fill(fresh, tmp_path_factory.mktemp("diffusers"), MAKE)


@pytest.mark.parametrize("load", ROWS)
def test_diffusers(load: Load, oracle: Any, made: str) -> None:
    compare(oracle, load.prepared("import diffusers"), made)
