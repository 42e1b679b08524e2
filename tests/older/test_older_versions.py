# SPDX-License-Identifier: MIT
"""transformers and diffusers of two years ago: native and cached compared, or a bypass with its reason.

Run by tests/older.sh, with those libraries; the models are made by them, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from conftest import Oracle
from parity.cases import rooted

if not transformers.__version__.startswith("4."):
    pytest.skip("for tests/older.sh", allow_module_level=True)

MAKE = """
import json, os, torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import (
    BertConfig, BertForMaskedLM, BertTokenizerFast, CLIPImageProcessor, CLIPTextConfig, CLIPTextModel, CLIPTokenizer,
    CLIPTokenizerFast, LlamaConfig, LlamaForCausalLM,
)
torch.manual_seed(0)
os.makedirs(root + "/clip")
letters = [chr(code) for code in range(33, 127)]
words = letters + [letter + "</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
with open(root + "/clip/vocab.json", "w") as file:
    json.dump({word: number for number, word in enumerate(words)}, file)
with open(root + "/clip/merges.txt", "w") as file:
    file.write("#version: 0.2\\n")
parts = root + "/clip/vocab.json", root + "/clip/merges.txt"
CLIPTokenizerFast(*parts, model_max_length=77).save_pretrained(root + "/clip_fast")
with open(root + "/words.txt", "w") as file:
    file.write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]))
BertTokenizerFast(root + "/words.txt").save_pretrained(root + "/bert_tokenizer")
small = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
BertForMaskedLM(BertConfig(**small)).save_pretrained(root + "/bert")
LlamaForCausalLM(LlamaConfig(**small)).to(torch.bfloat16).save_pretrained(root + "/llama")
unet = UNet2DConditionModel(
    block_out_channels=(32, 64), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
)
vae = AutoencoderKL(
    block_out_channels=[32, 64], down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
    latent_channels=4,
)
vae.save_pretrained(root + "/vae")
StableDiffusionPipeline(
    vae=vae, text_encoder=CLIPTextModel(CLIPTextConfig(**{**small, "vocab_size": 200})),
    tokenizer=CLIPTokenizer(*parts, model_max_length=77), unet=unet, scheduler=DDIMScheduler(), safety_checker=None,
    feature_extractor=None, requires_safety_checker=False,
).save_pretrained(root + "/pipeline")
CLIPImageProcessor().save_pretrained(root + "/processor")
torch.save({"a": torch.arange(9.0)}, root + "/tensors.pt")
torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())).save(root + "/script.pt")
"""

_FORWARD = "value = [describe(model), model(input_ids=torch.arange(5)[None])[0].sum().item()]"
_WORDS = "value = [it('hello world').input_ids, it.decode([3, 4]), len(it), repr(it)]"
HITS = {
    "llama, cast": f"""
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(root + "/llama", torch_dtype=torch.float32)
{_FORWARD}
value.append(model.generate(torch.arange(5)[None], max_new_tokens=5, do_sample=False).tolist())
""",
    "llama as it is": f"""
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained(root + "/llama", torch_dtype="auto")
{_FORWARD}
""",
    "slow tokenizer": f"""
from transformers import CLIPTokenizer
it = CLIPTokenizer.from_pretrained(root + "/clip")
{_WORDS}
""",
    "fast tokenizer": f"""
from transformers import AutoTokenizer
it = AutoTokenizer.from_pretrained(root + "/bert_tokenizer")
{_WORDS}
""",
    "image processor": """
from transformers import AutoImageProcessor
value = repr(AutoImageProcessor.from_pretrained(root + "/processor"))
""",
    "config": """
from transformers import AutoConfig
value = repr(AutoConfig.from_pretrained(root + "/bert"))
""",
    "vae": """
from diffusers import AutoencoderKL
value = describe(AutoencoderKL.from_pretrained(root + "/vae", torch_dtype=torch.float16))
""",
    "pipeline": """
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(root + "/pipeline", safety_checker=None)
pipe.set_progress_bar_config(disable=True)
made = pipe("a b", num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(1)).images
value = [describe(pipe.unet), describe(pipe.text_encoder), repr(pipe.scheduler), repr(pipe), made.sum().item()]
""",
    "vae=vae": """
from diffusers import AutoencoderKL, StableDiffusionPipeline
vae = AutoencoderKL.from_pretrained(root + "/vae")
pipe = StableDiffusionPipeline.from_pretrained(root + "/pipeline", vae=vae, torch_dtype=torch.float16)
value = [pipe.vae is vae, describe(pipe.unet), describe(pipe.vae)]
""",
    "torch.load": """
value = torch.load(root + "/tensors.pt")["a"].tolist()
""",
    "torch.jit.load": """
model = torch.jit.load(root + "/script.pt")
value = [str(model.graph), model(torch.ones(3)).tolist()]
""",
}
# What these versions do, natively, that can't be kept.
BYPASSES = {
    "bert draws its head's weights": f"""
from transformers import BertForMaskedLM
model = BertForMaskedLM.from_pretrained(root + "/bert")
{_FORWARD}
""",
    "the fast tokenizer of CLIP has another decode": f"""
from transformers import CLIPTokenizerFast
it = CLIPTokenizerFast.from_pretrained(root + "/clip_fast")
{_WORDS}
""",
}


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    start = rooted(folder) + "import torch\n"
    oracle.nat(start + MAKE)
    return start


@pytest.mark.parametrize("name", HITS)
def test_a_hit_is_what_the_load_gives(oracle: Oracle, before: str, name: str) -> None:
    assert oracle.hit(before + HITS[name]).records[-1][0] == "hit"


@pytest.mark.parametrize("name", BYPASSES)
def test_what_can_not_be_kept_is_loaded_as_ever(oracle: Oracle, before: str, name: str) -> None:
    assert oracle.by(before + BYPASSES[name]).records[-1][0] == "bypass"
