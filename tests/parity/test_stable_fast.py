# SPDX-License-Identifier: MIT
"""stable-fast: traces come back in a new process, over the module's own weights, whatever the numbers of the inputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import models
import pytest
from conftest import Oracle
from parity.cases import BEFORE, names

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sfast") is None,
    reason="stable-fast is not installed: tests/setup.sh installs it from ../shared/wheels where that folder is there",
)

SOURCE = """
import hashlib, warnings
warnings.simplefilter("ignore")
import overmind, torch
from sfast.compilers.diffusion_pipeline_compiler import CompilationConfig, compile_unet, compile_vae
from mylib import Net

config = CompilationConfig.Default()
{config}
torch.manual_seed({seed})
net = Net().eval()
net = overmind.load({wrap}, net, config)
value = []

def show(output):
    value.append([type(output).__qualname__, hashlib.sha256(output.sample.detach().numpy().tobytes()).hexdigest()])
"""

MYLIB = """
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((8, 1, 1), 2.0))
        self.factor = 3

    def forward(self, x, reading=False, changing=False):
        hidden = self.norm(self.conv(x)) * self.scale * self.factor
        if reading and x.sum() > 0:
            hidden = hidden - 1
        if changing:
            self.factor += 1
        hidden = self.out(hidden.permute(0, 2, 3, 1)).relu()
        return UNet2DConditionOutput(sample=hidden)
"""

CALLS = """
with torch.no_grad():
    for size in (8, 8, 16):
        show(net(torch.linspace(-1, {end}, 2 * 4 * size * size).reshape(2, 4, size, size)))
"""

LIVE = """
trace = list(net.forward._cached.values())[0].module
part = trace._c.getattr("module").getattr("module").getattr("conv")
value.append([part.getattr("weight") is net.conv.weight, type(trace).__qualname__])
value.append([type(trace._c.getattr("_sfast_module_registration_clear_hook")).__qualname__])
# The archive's compiler knows what is None: the question is gone, the branch is taken.
kinds = [node.kind() for node in trace.graph.nodes()]
value.append([kind for kind in kinds if kind.startswith("aten::") and kind != "aten::__isnot__"])
with torch.no_grad():
    net.conv.weight.mul_(2)
    net.scale.mul_(3)
    show(net(torch.ones(2, 4, 8, 8)))
output = net(torch.ones(2, 4, 8, 8))
output.sample.sum().backward()
value.append(net.conv.weight.grad.double().sum().item())
"""


@pytest.fixture
def start(oracle: Oracle, folder: Path) -> str:
    (folder / "mylib.py").write_text(MYLIB)
    oracle.nat("")  # a process that starts within the same tick of the clock would find the file changed since
    return f"{BEFORE}\nsys.path.insert(0, {str(folder)!r})\n"


def source(after: str, wrap: str = "compile_unet", seed: int = 0, end: int = 1, config: str = "") -> str:
    return SOURCE.format(wrap=wrap, seed=seed, config=config) + after.replace("{end}", str(end))


@pytest.mark.parametrize("config", ["", "config.preserve_parameters = False"])
def test_two_shapes_and_the_live_module(oracle: Oracle, start: str, config: str) -> None:
    live = "" if config else LIVE
    run = oracle.hit(start + source(CALLS + live, config=config))
    assert [record[2] for record in run.records] == ["sfast.jit.trace_helper.trace_with_kwargs"]


def test_other_weights_and_numbers_are_a_hit_with_their_own_output(oracle: Oracle, start: str) -> None:
    first = oracle.run(start + source(CALLS))
    assert [record[0] for record in first.records] == ["miss"], first.records
    for seed, end in ((1, 1), (0, 2)):
        text = start + source(CALLS, seed=seed, end=end)
        run = oracle.run(text)
        assert [record[0] for record in run.records] == ["hit"], run.records
        assert run.value == oracle.nat(text).value


def test_frozen_weights_belong_to_the_key(oracle: Oracle, start: str) -> None:
    config = "config.preserve_parameters = False"
    oracle.run(start + source(CALLS, config=config))
    text = start + source(CALLS, seed=1, config=config)
    run = oracle.run(text)
    assert [record[0] for record in run.records] == ["miss"]
    assert run.value == oracle.nat(text).value


def test_hooks_on_every_child(oracle: Oracle, start: str) -> None:
    run = oracle.hit(start + source(CALLS, wrap="compile_vae"))
    assert run.records


@pytest.mark.parametrize(
    ("argument", "reason"),
    [("reading=True", "depends on the values of its inputs"), ("changing=True", "changed its module")],
)
def test_a_trace_that_would_not_serve_others_is_not_kept(
    oracle: Oracle, start: str, argument: str, reason: str
) -> None:
    calls = CALLS.replace("size, size)))", f"size, size), {argument}))")
    run = oracle.by(start + source(calls))
    assert run.records[0][0] == "bypass"
    assert reason in run.records[0][1]


# The cell of stable-fast's README that compiles a pipeline. This machine has no CUDA device, and 30 steps for 512 by
# 512 pixels are a minute's work for it: those three places are filled in below, the rest is as it is printed there.
README = """
import torch
from diffusers import (StableDiffusionPipeline, EulerAncestralDiscreteScheduler)
from sfast.compilers.stable_diffusion_pipeline_compiler import (compile,
                                                                CompilationConfig
                                                                )

def load_model():
    # you can change to StableDiffusionXLPipeline to load SDXL model
    model = StableDiffusionPipeline.from_pretrained(
        'runwayml/stable-diffusion-v1-5', torch_dtype=torch.float16)

    model.scheduler = EulerAncestralDiscreteScheduler.from_config(
        model.scheduler.config)
    model.safety_checker = None
    model.to(torch.device('{device}'))
    return model

model = load_model()

config = CompilationConfig.Default()

# xformers and Triton are suggested for achieving best performance.
# It might be slow for Triton to generate, compile and fine-tune kernels.
try:
    import xformers
    config.enable_xformers = True
except ImportError:
    print('xformers not installed, skip')
# NOTE: On some recent GPUs (for example, RTX 4080), Triton might generate slow kernels.
# Disable Triton if you encounter this problem.
try:
    import triton
    config.enable_triton = True
except ImportError:
    print('Triton not installed, skip')
# CUDA Graph is suggested for small batch sizes to reduce CPU overhead.
# My implementation can handle dynamic shape with increased need for GPU memory.
# If you meet problems related to it, you should disable it.
config.enable_cuda_graph = True

compiled_model = {compile}model, config)

kwarg_inputs = dict(
    prompt=
    '(masterpiece:1,2), best quality, masterpiece, best detail face, lineart, monochrome, a beautiful girl',
    height={size},
    width={size},
    num_inference_steps={steps},
    num_images_per_prompt=1,
)

# NOTE: Warm it up.
# The first call will trigger compilation and might be very slow.
# After the first call, it should be very fast.
output_image = compiled_model(**kwarg_inputs).images[0]

# Let's see the second call!
output_image = compiled_model(**kwarg_inputs).images[0]
"""
TRACES = ["CLIPTextModel.forward", "UNet2DConditionModel.forward", "Conv2d._call_impl", "Decoder._call_impl"]


@pytest.mark.parametrize("call", ["compile(", "load(compile, "], ids=["as printed", "overmind.load"])
def test_the_cell_of_the_readme(oracle: Oracle, folder: Path, call: str) -> None:
    """A whole pipeline, for two shapes: text encoder, UNet and each part of the VAE that can be traced."""
    (folder / "runwayml").mkdir()
    (folder / "runwayml" / "stable-diffusion-v1-5").symlink_to(models.folder("tiny_pipeline"))
    cell = README.format(device="cpu", size=32, steps=2, compile=call)
    run = oracle.hit(
        BEFORE
        + "import warnings\nwarnings.simplefilter('ignore')\ntorch.manual_seed(0)\n"
        + cell
        + """
import hashlib
value = [hashlib.sha256(output_image.tobytes()).hexdigest(), [*output_image.size]]
wide = compiled_model(**{**kwarg_inputs, "width": 64}).images[0]
value += [hashlib.sha256(wide.tobytes()).hexdigest(), [*wide.size]]
ids = torch.arange(8)[None]
for flag in (True, False):
    states = compiled_model.text_encoder(ids, return_dict=flag)
    value.append([type(states).__name__, describe(states)])
""",
        cwd=str(folder),
    )
    traced = [record for record in run.records if record[2] == "sfast.jit.trace_helper.trace_with_kwargs"]
    assert len(traced) == len(TRACES) + 2, run.records
    assert run.value[0] != run.value[2]


def test_hidden_states_of_a_text_encoder(oracle: Oracle) -> None:
    """transformers puts hooks on a module when it is first asked for these, and a hit would not."""
    run = oracle.by(
        names()
        + BEFORE
        + """
import warnings
warnings.simplefilter("ignore")
from sfast.compilers.diffusion_pipeline_compiler import CompilationConfig, _build_lazy_trace
from transformers import CLIPTextModel
m = CLIPTextModel.from_pretrained(tiny_pipeline + "/text_encoder", dtype=torch.float32)
m.forward = _build_lazy_trace(CompilationConfig.Default())(m.forward)
with torch.no_grad():
    out = m(torch.arange(8)[None], output_hidden_states=True)
value = [describe(dict(out)), [len(part._forward_hooks) for part in m.modules()]]
"""
    )
    assert run.outcomes == ["hit", "bypass"], run.records
    assert "changed its module" in run.reasons[1]
