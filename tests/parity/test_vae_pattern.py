# SPDX-License-Identifier: MIT
"""The vae=vae pattern: a loader that is given loaded objects hits with the caller's own objects in place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from parity.cases import BEFORE, names

IMPORTS = """
import diffusers, hashlib, torch, transformers
from diffusers import AutoencoderKL, ControlNetModel, DiffusionPipeline, StableDiffusionControlNetPipeline

def mark(module):
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]

def edit(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
"""
LOAD_VAE = "vae = AutoencoderKL.from_pretrained(tiny_vae)\n"
LOAD_CONTROLNETS = (
    "a = ControlNetModel.from_pretrained(tiny_controlnet_a)\nb = ControlNetModel.from_pretrained(tiny_controlnet_b)\n"
)
PIPE = "pipe = DiffusionPipeline.from_pretrained(tiny_pipeline, vae=vae)\n"
PIPELINE_LOADER = "DiffusionPipeline"


def source(body: str) -> str:
    return names() + BEFORE + IMPORTS + body


def pipeline_records(run: Any) -> list[Any]:
    found = [record for record in run.records if PIPELINE_LOADER in record[2]]
    assert found, f"no pipeline load among {run.records}"
    return found


def test_a_pipeline_hits_with_the_callers_vae_in_place(oracle: Any) -> None:
    body = LOAD_VAE + PIPE + "value = [pipe.vae is vae, mark(pipe.vae), mark(pipe.unet), describe(pipe)]"
    run = oracle.hit(source(body))
    assert run.value[0] is True


def test_a_changed_vae_stays_changed(oracle: Any) -> None:
    body = LOAD_VAE + "value = [mark(vae)]\nedit(vae)\n" + PIPE + "value += [mark(pipe.vae), pipe.vae is vae]"
    run = oracle.hit(source(body))
    before, after, same = run.value
    assert before != after and same
    # Who comes next with an unchanged vae gets no trace of the change.
    untouched = oracle.run(source(LOAD_VAE + PIPE + "value = mark(pipe.vae)"))
    assert untouched.outcomes == ["hit", "hit"]
    assert untouched.value == before


def test_a_vae_changed_after_the_load_changes_the_pipeline(oracle: Any) -> None:
    body = LOAD_VAE + PIPE + "was = mark(vae)\nedit(vae)\nvalue = [mark(pipe.vae) == mark(vae), mark(vae) == was]"
    assert oracle.hit(source(body)).value == [True, False]


def test_the_entry_holds_no_bytes_of_the_vae(oracle: Any) -> None:
    size = "value = sum(t.untyped_storage().nbytes() for t in pipe.vae.state_dict().values())"
    own = "pipe = DiffusionPipeline.from_pretrained(tiny_pipeline)\n"
    with_its_own = oracle.run(source(own + size))
    with_ours = oracle.run(source(LOAD_VAE + PIPE + size))
    assert with_its_own.outcomes == ["miss"] and with_ours.outcomes[-1] == "miss"
    saved = pipeline_records(with_its_own)[0][4] - pipeline_records(with_ours)[-1][4]
    assert saved >= with_its_own.value, f"the entry is only {saved} bytes smaller; a vae has {with_its_own.value}"


MADE_HERE = """
torch.manual_seed(int.from_bytes(__import__("os").urandom(4), "big"))
vae = AutoencoderKL.from_config(AutoencoderKL.load_config(tiny_vae))
"""


@pytest.mark.parametrize(
    "get_vae",
    [
        pytest.param("vae = AutoencoderKL.from_config(AutoencoderKL.load_config(tiny_vae))\n", id="made_here"),
        pytest.param(MADE_HERE, id="made_here_always_different"),
        pytest.param(LOAD_VAE + "vae = vae.to(torch.float32)\n", id="cast_here"),
        pytest.param(LOAD_VAE + "import copy\nvae = copy.deepcopy(vae)\n", id="copied_here"),
        pytest.param("vae = AutoencoderKL.from_pretrained(tiny_vae, torch_dtype=torch.float32)\n", id="cast_at_load"),
        pytest.param(
            "from safetensors.torch import load_file\n"
            "vae = AutoencoderKL.from_config(AutoencoderKL.load_config(tiny_vae))\n"
            "vae.load_state_dict(load_file(tiny_vae + '/diffusion_pytorch_model.safetensors'))\n",
            id="filled_here",
        ),
    ],
)
def test_a_vae_from_anywhere(oracle: Any, get_vae: str) -> None:
    body = get_vae + "was = mark(vae)\n" + PIPE + "value = [pipe.vae is vae, mark(vae) == was, mark(pipe.unet)]"
    assert oracle.hit(source(body)).value[:2] == [True, True]


def test_it_matters_not_whether_the_vae_was_a_hit(oracle: Any) -> None:
    """The vae from this process on the way in, from the cache on the way back, and the reverse."""
    here = "vae = AutoencoderKL.from_config(AutoencoderKL.load_config(tiny_vae)).to(torch.float16)\n"
    ask = PIPE + "value = [pipe.vae is vae, mark(pipe.unet), mark(pipe.text_encoder)]"
    native = oracle.nat(source(here + ask)).value
    first = oracle.run(source(here + ask))
    assert first.outcomes == ["miss"] and first.value == native
    loaded = oracle.run(source(LOAD_VAE + ask))
    assert loaded.value == native
    again = oracle.run(source(here + ask))
    assert again.outcomes == ["hit"] and again.value == native
    cached = oracle.run(source(LOAD_VAE + ask))
    assert cached.outcomes == ["hit", "hit"] and cached.value == native


def test_two_vaes_each_in_its_own_pipeline(oracle: Any) -> None:
    body = (
        LOAD_VAE
        + "other = AutoencoderKL.from_pretrained(tiny_vae)\nedit(other)\n"
        + "one = DiffusionPipeline.from_pretrained(tiny_pipeline, vae=vae)\n"
        + "two = DiffusionPipeline.from_pretrained(tiny_pipeline, vae=other)\n"
        + "value = [one.vae is vae, two.vae is other, mark(vae), mark(other), one.unet is two.unet,\n"
        + "         mark(one.unet) == mark(two.unet)]\n"
        + "edit(one.unet)\nvalue.append(mark(one.unet) == mark(two.unet))"
    )
    value = oracle.hit(source(body)).value
    assert value[:2] == [True, True] and value[2] != value[3]
    assert value[4:] == [False, True, False]


CONTROLLED = "pipe = StableDiffusionControlNetPipeline.from_pretrained(tiny_pipeline, {})\n"


@pytest.mark.parametrize(
    "arguments, same",
    [
        ("controlnet=a", "[pipe.controlnet is a]"),
        ("controlnet=[a, b]", "[pipe.controlnet.nets[0] is a, pipe.controlnet.nets[1] is b]"),
        ("controlnet=[b, a]", "[pipe.controlnet.nets[0] is b, pipe.controlnet.nets[1] is a]"),
        ("controlnet=(a, b)", "[pipe.controlnet.nets[0] is a, pipe.controlnet.nets[1] is b]"),
        ("controlnet=[a, a]", "[pipe.controlnet.nets[0] is a, pipe.controlnet.nets[1] is a]"),
        ("**{'controlnet': [a, b]}", "[pipe.controlnet.nets[0] is a, pipe.controlnet.nets[1] is b]"),
        ("vae=vae, controlnet=[a, b]", "[pipe.vae is vae, pipe.controlnet.nets[0] is a, pipe.controlnet.nets[1] is b]"),
    ],
)
def test_controlnets(oracle: Any, arguments: str, same: str) -> None:
    body = (
        LOAD_VAE
        + LOAD_CONTROLNETS
        + CONTROLLED.format(arguments)
        + f"value = [{same}, mark(pipe.controlnet), describe(pipe)]"
    )
    assert all(oracle.hit(source(body)).value[0])


def test_the_order_of_a_list_is_not_lost(oracle: Any) -> None:
    """Two controlnets of one class and config: only their places tell them apart."""
    body = LOAD_CONTROLNETS + CONTROLLED + "value = [mark(net) for net in pipe.controlnet.nets]"
    forth = oracle.hit(source(body.format("controlnet=[a, b]"))).value
    back = oracle.run(source(body.format("controlnet=[b, a]"))).value
    assert back == forth[::-1] and forth[0] != forth[1]
    twice = oracle.run(source(body.format("controlnet=[a, a]"))).value
    assert twice == [forth[0]] * 2


PARTS = """
vae = AutoencoderKL.from_pretrained(tiny_pipeline, subfolder="vae")
unet = diffusers.UNet2DConditionModel.from_pretrained(tiny_pipeline, subfolder="unet")
text_encoder = transformers.CLIPTextModel.from_pretrained(tiny_pipeline, subfolder="text_encoder")
tokenizer = transformers.CLIPTokenizer.from_pretrained(tiny_pipeline, subfolder="tokenizer")
scheduler = diffusers.DDIMScheduler.from_pretrained(tiny_pipeline, subfolder="scheduler")
parts = dict(vae=vae, unet=unet, text_encoder=text_encoder, tokenizer=tokenizer, scheduler=scheduler)
"""


def test_every_part_may_be_the_callers(oracle: Any) -> None:
    body = (
        PARTS
        + "pipe = DiffusionPipeline.from_pretrained(tiny_pipeline, **parts)\n"
        + "value = [{name: getattr(pipe, name) is part for name, part in parts.items()}, describe(pipe)]"
    )
    # A bypass is right: diffusers writes into a scheduler that it is given, and a tokenizer is no module.
    run = oracle.by(source(body))
    assert set(run.value[0].values()) == {True}


def test_modules_only_must_hit(oracle: Any) -> None:
    body = (
        PARTS
        + "parts = {name: parts[name] for name in ('vae', 'unet', 'text_encoder')}\n"
        + "pipe = DiffusionPipeline.from_pretrained(tiny_pipeline, **parts)\n"
        + "value = [{name: getattr(pipe, name) is part for name, part in parts.items()}, describe(pipe)]"
    )
    run = oracle.hit(source(body))
    assert set(run.value[0].values()) == {True}


GATHER = """
class Holder:
    pass

def gather(path, parts, more=()):
    holder = Holder()
    holder.size = len(open(path).read())
    holder.parts = dict(parts)
    holder.more = list(more)
    return holder
"""


def test_any_callable_with_modules_in_dicts_and_lists(oracle: Any, tmp_path: Any) -> None:
    """A bypass is right: Overmind can't know what an unknown callable looks at in a module."""
    (tmp_path / "gather.py").write_text(GATHER)
    (tmp_path / "note").write_text("abc")
    body = (
        LOAD_VAE
        + LOAD_CONTROLNETS
        + "import sys\nsys.path.insert(0, made)\nimport gather\n"
        + "got = load(gather.gather, made + '/note', {'vae': vae, 'deep': {'a': a}}, more=[b, a])\n"
        + "value = [got.parts['vae'] is vae, got.parts['deep']['a'] is a, got.more[0] is b, got.more[1] is a, got.size]"
    )
    run = oracle.by(names(str(tmp_path)) + BEFORE + IMPORTS + body)
    assert run.value == [True, True, True, True, 3]


def test_a_single_file_takes_parts_too(oracle: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "pipeline.safetensors")
    oracle.nat(names() + f"from parity import single_file\nsingle_file.write(tiny_pipeline, {path!r})")
    body = (
        LOAD_VAE
        + f"pipe = diffusers.StableDiffusionPipeline.from_single_file({path!r}, config=tiny_pipeline, vae=vae)\n"
        + "value = [pipe.vae is vae, describe(pipe)]"
    )
    run = oracle.hit(source(body))
    assert run.value[0] is True


QUANTISED = """
from transformers import BitsAndBytesConfig, CLIPTextModel
import logging
logging.disable(logging.WARNING)
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4")
encoder = CLIPTextModel.from_pretrained(tiny_pipeline, subfolder="text_encoder", quantization_config=config)
"""
SCRIPTED = """
import os, warnings
warnings.simplefilter("ignore")
vae = AutoencoderKL.from_pretrained(tiny_vae, torch_dtype=torch.float32)
file = os.environ["OVERMIND_RUNTIME_DIR"] + "/decoder.pt"
if not os.path.exists(file):
    torch.jit.trace(vae.decoder, torch.ones(1, 4, 4, 4), check_trace=False).save(file)
vae.decoder = torch.jit.load(file)
"""


@pytest.mark.parametrize(
    ("get", "part", "use"),
    [
        (QUANTISED, "text_encoder=encoder", "describe(encoder)"),
        (SCRIPTED, "vae=vae", "describe(vae.decode(torch.ones(1, 4, 4, 4)).sample)"),
    ],
    ids=["quantised", "scripted"],
)
def test_a_part_that_was_compiled_or_quantised(oracle: Any, get: str, part: str, use: str) -> None:
    name, given = part.split("=")
    body = (
        get
        + f"""
pipe = DiffusionPipeline.from_pretrained(tiny_pipeline, {part})
value = [pipe.{name} is {given}, {use}, mark(pipe.unet)]
"""
    )
    run = oracle.hit(source(body))
    assert run.value[0] is True


COMPUTED = {
    "text_encoder_4bit": """
part = transformers.CLIPTextModel.from_pretrained(tiny_pipeline + "/text_encoder", quantization_config=
    transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4"))
name, use = "text_encoder", lambda m: m.state_dict()  # bitsandbytes computes with no layer that is so small
""",
    "text_encoder_8bit": """
part = transformers.CLIPTextModel.from_pretrained(tiny_pipeline + "/text_encoder", quantization_config=
    transformers.BitsAndBytesConfig(load_in_8bit=True))
name, use = "text_encoder", lambda m: m(torch.arange(8)[None]).last_hidden_state
""",
    "vae_scripted_parts": """
part = AutoencoderKL.from_pretrained(tiny_vae, torch_dtype=torch.float32).eval()
part.decoder = torch.jit.trace(part.decoder, torch.ones(1, 4, 8, 8))
part.post_quant_conv = torch.jit.script(part.post_quant_conv)
name, use = "vae", lambda m: m.decode(torch.ones(1, 4, 8, 8)).sample
""",
    "vae_from_an_archive": """
part = AutoencoderKL.from_pretrained(tiny_vae, torch_dtype=torch.float32).eval()
part.decoder = torch.jit.load(made + "/decoder.pt")
name, use = "vae", lambda m: m.decode(torch.ones(1, 4, 8, 8)).sample
""",
    "unet_compiled": """
from sfast.compilers.diffusion_pipeline_compiler import CompilationConfig, compile_unet
part = diffusers.UNet2DConditionModel.from_pretrained(tiny_pipeline, subfolder="unet", torch_dtype=torch.float32)
part = load(compile_unet, part.eval(), CompilationConfig.Default())
name = "unet"
def use(m):
    return m(torch.ones(1, 4, 8, 8), torch.tensor(3), encoder_hidden_states=torch.ones(1, 7, 16)).sample
{before}
""",
    "unet_compiled_and_used": "",
}
COMPUTED["unet_compiled_and_used"] = COMPUTED["unet_compiled"].format(before="with torch.no_grad():\n    use(part)")
COMPUTED["unet_compiled"] = COMPUTED["unet_compiled"].format(before="")
DECODER = """
part = AutoencoderKL.from_pretrained(tiny_vae, torch_dtype=torch.float32).eval()
torch.jit.save(torch.jit.trace(part.decoder, torch.ones(1, 4, 8, 8)), made + "/decoder.pt")
"""


@pytest.mark.parametrize("what", COMPUTED)
def test_parts_that_were_computed(oracle: Any, tmp_path: Path, what: str) -> None:
    """A quantised text encoder, a VAE with scripted parts, a UNet compiled by stable-fast: in place, and working."""
    if what.startswith("unet") and importlib.util.find_spec("sfast") is None:
        pytest.skip("stable-fast is not installed")
    start = "import warnings\nwarnings.simplefilter('ignore')\n" + names(str(tmp_path)) + BEFORE + IMPORTS
    if "archive" in what:
        oracle.nat(start + DECODER)
    run = oracle.hit(
        start
        + COMPUTED[what]
        + """
pipe = DiffusionPipeline.from_pretrained(tiny_pipeline, **{name: part})
with torch.no_grad():
    value = [getattr(pipe, name) is part, describe(use(getattr(pipe, name))), mark(pipe.unet), type(part).__name__]
"""
    )
    assert run.value[0] is True
    assert pipeline_records(run)[0][0] == "hit"


def test_a_scripted_vae_that_the_pipeline_refuses(oracle: Any) -> None:
    """It has no config: natively an error, and the same one with Overmind."""
    body = (
        "part = torch.jit.script(torch.nn.Conv2d(4, 3, 1))\n"
        + "try:\n    DiffusionPipeline.from_pretrained(tiny_pipeline, vae=part)\n    value = 'loaded'\n"
        + "except Exception as error:\n    value = [type(error).__name__, str(error)]"
    )
    native = oracle.nat(source(body)).value
    assert native != "loaded"
    assert oracle.run(source(body)).value == native
    assert oracle.run(source(body)).value == native
