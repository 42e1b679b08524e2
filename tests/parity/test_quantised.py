# SPDX-License-Identifier: MIT
"""Quantised loads: bitsandbytes in 4 and 8 bit, GGUF; native against cached.

A hit has the classes, the attributes and the shared memory of the native parameters, computes the same bit for bit,
trains, saves the same bytes and refuses the same calls with the same errors.
"""

from __future__ import annotations

from typing import Any

import pytest
from fresh import Fresh
from parity.cases import Load, compare, fill

MAKE = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

for name, config in [
    ("four", BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4")),
    ("eight", BitsAndBytesConfig(load_in_8bit=True)),
]:
    AutoModelForCausalLM.from_pretrained(tiny_llama64, quantization_config=config).save_pretrained(made + "/" + name)

import os
import gguf
plain = AutoModelForCausalLM.from_pretrained(tiny_llama64, dtype=torch.float32)
config = plain.config
os.makedirs(made + "/gguf")
writer = gguf.GGUFWriter(made + "/gguf/model.gguf", "llama")
writer.add_context_length(config.max_position_embeddings)
writer.add_embedding_length(config.hidden_size)
writer.add_block_count(config.num_hidden_layers)
writer.add_feed_forward_length(config.intermediate_size)
writer.add_head_count(config.num_attention_heads)
writer.add_head_count_kv(config.num_key_value_heads)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_rope_freq_base(10000.0)
writer.add_vocab_size(config.vocab_size)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
for name, tensor in plain.state_dict().items():
    kind = gguf.GGMLQuantizationType.Q8_0 if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
    data = gguf.quants.quantize(tensor.numpy(), kind)
    writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""

SETUP = """
import logging
import warnings
import bitsandbytes
import transformers
from transformers import BitsAndBytesConfig as Config
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

def logits(m):
    with torch.no_grad():
        return m.eval()(torch.arange(12).view(2, 6)).logits

def refused(m):
    '''What a quantised model says to the calls that it does not take, or what they give.'''
    said = []
    for call in (lambda: m.half(), lambda: m.float(), lambda: m.cuda(), lambda: m.to("meta"),
                 lambda: m.to(torch.float16), lambda: m.to("cpu") is m):
        try:
            said.append(str(call())[:80])
        except Exception as error:
            said.append([type(error).__name__, str(error)])
    return said

def own(m):
    '''Who refers to whom among the parameters, their states and their modules.'''
    found = []
    for name, part in m.named_modules():
        weight = getattr(part, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is not None:
            books = bitsandbytes.functional.name2qmap
            found.append([name, weight.module is part, part.quant_state is state,
                          state.nested and state.state2.code is books.get("dynamic")])
        elif getattr(weight, "CB", None) is not None:
            found.append([name, weight.CB.data_ptr() == weight.data_ptr()])
    return found

def lora_step(m):
    '''One step of LoRA: the adapters move, the quantised weights do not.'''
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    torch.manual_seed(0)
    m = get_peft_model(prepare_model_for_kbit_training(m, use_gradient_checkpointing=False),
                       LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
    trained = [p for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    ids = torch.arange(12).view(2, 6)
    losses = []
    for _ in range(2):
        loss = m(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return [losses, trained, {k: v for k, v in m.state_dict().items() if "lora" not in k}]
"""

EVERYTHING = "[own(m), logits(m), saved(m), refused(m), own(m)]"
STORED = "[own(m), logits(m), refused(m)]"  # measured: transformers 5.24 can't save what it loaded quantised


def _model(config: str, cls: str = "LlamaForCausalLM", more: str = "") -> str:
    return f"transformers.{cls}.from_pretrained(tiny_llama64, quantization_config={config}{more})"


NESTED = "Config(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type='nf4')"
EIGHT = "Config(load_in_8bit=True)"

ROWS = [
    Load("fp4", _model("Config(load_in_4bit=True)"), EVERYTHING),
    Load("nf4", _model("Config(load_in_4bit=True, bnb_4bit_quant_type='nf4')"), EVERYTHING),
    Load("nested", _model(NESTED), EVERYTHING),
    Load("nested_auto", _model(NESTED, "AutoModelForCausalLM"), EVERYTHING),
    Load("compute", _model("Config(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)"), EVERYTHING),
    Load("storage", _model("Config(load_in_4bit=True, bnb_4bit_quant_storage='bfloat16')"), EVERYTHING),
    Load("skip", _model("Config(load_in_4bit=True, llm_int8_skip_modules=['q_proj'])"), EVERYTHING),
    Load("dict", _model("{'load_in_4bit': True, 'quant_method': 'bitsandbytes'}"), EVERYTHING),
    Load("full_floats", _model(NESTED, more=", dtype=torch.float32"), EVERYTHING),
    Load("device_map", _model(NESTED, more=", device_map='cpu'"), EVERYTHING),
    Load("eight", _model(EIGHT), EVERYTHING),
    Load("eight_threshold", _model("Config(load_in_8bit=True, llm_int8_threshold=0.0)"), EVERYTHING),
    Load("eight_fp16", _model("Config(load_in_8bit=True, llm_int8_has_fp16_weight=True)"), "[own(m), saved(m)]"),
    Load("four_stored", "transformers.AutoModelForCausalLM.from_pretrained(made + '/four')", STORED),
    Load("eight_stored", "transformers.AutoModelForCausalLM.from_pretrained(made + '/eight')", STORED),
    Load("four_lora", _model(NESTED), "lora_step(m)"),
    Load("eight_lora", _model(EIGHT), "lora_step(m)"),
    Load("four_dequantised", _model(NESTED), "[m.dequantize(), logits(m)]"),
    Load("eight_dequantised", _model(EIGHT), "[m.dequantize(), logits(m)]"),
    Load("four_copied", _model(NESTED), "__import__('copy').deepcopy(m)"),
    Load("eight_copied", _model(EIGHT), "__import__('copy').deepcopy(m)"),
]

GGUF = "transformers.LlamaForCausalLM.from_pretrained(made + '/gguf', gguf_file='model.gguf'"
ROWS += [
    Load("gguf", GGUF + ")", "[logits(m), refused(m)]"),
    Load("gguf_half", GGUF + ", dtype=torch.float16)", "m.state_dict()"),
]

OPTIONS = """
from transformers import LlamaForCausalLM
import overmind
options = [
    dict(load_in_8bit=True), dict(load_in_8bit=True, llm_int8_threshold=5.0),
    dict(load_in_8bit=True, llm_int8_skip_modules=["q_proj"]), dict(load_in_8bit=True, llm_int8_has_fp16_weight=True),
    dict(load_in_8bit=True, llm_int8_enable_fp32_cpu_offload=True),
    dict(load_in_4bit=True), dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    dict(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    dict(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16),
    dict(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16),
]
for option in options:
    LlamaForCausalLM.from_pretrained(tiny_llama64, quantization_config=Config(**option))
"""

CHANGED = """
from transformers import LlamaForCausalLM
config = Config(load_in_4bit=True)
m = LlamaForCausalLM.from_pretrained(tiny_llama64, quantization_config=config)
weight = m.model.layers[0].self_attn.q_proj.weight
before = logits(m)
weight.data.zero_()
weight.quant_state.absmax.zero_()
n = LlamaForCausalLM.from_pretrained(tiny_llama64, quantization_config=config)
value = [torch.equal(logits(m), before), torch.equal(logits(n), before), m.config.quantization_config is config]
"""


@pytest.fixture(scope="module")
def made(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> str:
    return fill(fresh, tmp_path_factory.mktemp("quantised"), MAKE)


@pytest.mark.parametrize("load", [pytest.param(load, id=load.name) for load in ROWS])
def test_quantised(load: Load, oracle: Any, made: str) -> None:
    compare(oracle, load.prepared(SETUP), made)


def _source(body: str, made: str) -> str:
    from parity.cases import BEFORE, names

    return names(made) + BEFORE + SETUP + body


def test_every_option_is_part_of_the_key(oracle: Any, made: str) -> None:
    run = oracle.run(_source(OPTIONS, made))
    assert set(run.outcomes) == {"miss"} and len(run.records) == 10, run.records
    assert len({record[3] for record in run.records}) == 10


def test_writes_stay_here(oracle: Any, made: str) -> None:
    run = oracle.hit(_source(CHANGED, made))
    assert run.value == [False, True, True]


PIPELINE = """
import diffusers
from diffusers import DiffusionPipeline
from diffusers.quantizers import PipelineQuantizationConfig
value = []

def quantised(config, **more):
    m = DiffusionPipeline.from_pretrained(tiny_pipeline, quantization_config=config, dtype=torch.float32, **more)
    noted = config.config_mapping["text_encoder"]
    same = [m.quantization_config is config, m.text_encoder.config.quantization_config is noted,
            noted is (config.quant_mapping or {}).get("text_encoder")]
    value.append([same, list(config.config_mapping), describe(noted), describe(m.text_encoder.state_dict()),
                  own(m.text_encoder), [type(p).__name__ for p in m.text_encoder.parameters()]])
    return m

def whole(backend="bitsandbytes_4bit", parts="text_encoder", **options):
    return PipelineQuantizationConfig(quant_backend=backend, quant_kwargs=options, components_to_quantize=parts)
"""
# diffusers 0.42 quantises its own models on CUDA devices only, so here it is the text encoder.
PIPELINE_USES = {
    "four": "quantised(whole(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type='nf4'))",
    "eight": "quantised(whole('bitsandbytes_8bit', load_in_8bit=True, llm_int8_threshold=5.0))",
    "mapping": "quantised(PipelineQuantizationConfig(quant_mapping={'text_encoder': Config(load_in_8bit=True)}))",
    "used_before": "c = whole(load_in_4bit=True)\nquantised(c)\nquantised(c)",
    "beside_a_vae": """
vae = diffusers.AutoencoderKL.from_pretrained(tiny_vae, dtype=torch.float32)
m = quantised(whole(load_in_4bit=True), vae=vae)
value.append(m.vae is vae)
""",
}


@pytest.mark.parametrize("name", PIPELINE_USES)
def test_pipeline_quantisation(oracle: Any, made: str, name: str) -> None:
    oracle.hit(_source(PIPELINE + PIPELINE_USES[name], made))


def test_every_option_of_a_pipelines_quantisation_is_part_of_the_key(oracle: Any, made: str) -> None:
    run = oracle.run(
        _source(
            PIPELINE
            + """
four = dict(load_in_4bit=True)
for config in (
    whole(**four), whole(**four, bnb_4bit_quant_type="nf4"), whole(**four, bnb_4bit_use_double_quant=True),
    whole(**four, bnb_4bit_compute_dtype=torch.float16), whole(**four, bnb_4bit_quant_storage=torch.bfloat16),
    whole(**four, parts=["text_encoder", "safety_checker"]),
    whole("bitsandbytes_8bit", load_in_8bit=True),
    whole("bitsandbytes_8bit", load_in_8bit=True, llm_int8_threshold=5.0),
    whole("bitsandbytes_8bit", load_in_8bit=True, llm_int8_skip_modules=["fc1"]),
    PipelineQuantizationConfig(quant_mapping={"text_encoder": Config(load_in_4bit=True)}),
    PipelineQuantizationConfig(quant_mapping={"text_encoder": Config(load_in_8bit=True)}),
):
    quantised(config)
""",
            made,
        )
    )
    assert set(run.outcomes) == {"miss"} and len(run.records) == 11, run.records
    assert len({record[3] for record in run.records}) == 11
