# SPDX-License-Identifier: MIT
"""stable-fast: traces come back in a new process, over the module's own weights, whatever the numbers of the inputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import BEFORE

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
