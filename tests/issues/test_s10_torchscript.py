# SPDX-License-Identifier: MIT
"""S10: TorchScript modules.

A ScriptModule has no pickle; a cache that reads its archive anew copies every weight, and one that keeps only the
module forgets `_extra_files`, which torch.jit.load fills in on the caller's dict.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

MYLIB = """
import torch
from torch import nn


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(64, 64)
        self.register_buffer("scale", torch.full((64,), 2.0))
        self.table = {"a": torch.arange(3.0)}

    def forward(self, x):
        for _ in range(2):
            x = self.lin(x) * self.scale
        return x + self.table["a"][1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Inner()
        self.second = Inner()
        self.second.lin.weight = self.first.lin.weight

    def forward(self, x, times: int = 1):
        return self.second(self.first(x)) * times

    @torch.jit.export
    def names(self, prefix: str):
        return [prefix + "a", prefix + "b"]


class Holder(nn.Module):
    def __init__(self, script, path):
        super().__init__()
        self.plain = nn.utils.skip_init(nn.Linear, 64, 64)
        self.plain.load_state_dict(torch.load(path))
        self.script = script

    def forward(self, x):
        return self.script(self.plain(x))


def double(x):
    return x * 2


def holder(path, weights):
    return Holder(torch.jit.load(path), weights)


def compiled(how, path):
    with torch.device("meta"):
        net = Inner().eval()  # drawing random weights would be a reason not to cache
    net.lin.weight, net.lin.bias = (nn.Parameter(weight) for weight in torch.load(path).values())
    net.scale, net.table = torch.full((64,), 2.0), {"a": torch.arange(3.0)}
    if how == "traced":
        return torch.jit.trace(net, torch.ones(1, 64))
    script = torch.jit.script(net)
    return torch.jit.freeze(script) if how == "frozen" else script
"""

MAKE = """
torch.manual_seed(0)
net = mylib.Net().eval()
script = torch.jit.script(net)
torch.jit.save(script, root + "/script.pt", _extra_files={"k": "value", "bytes": b"\\x00\\xff"})
torch.jit.save(torch.jit.trace(mylib.Inner().eval(), torch.ones(1, 64)), root + "/trace.pt")
torch.jit.save(torch.jit.freeze(script), root + "/frozen.pt")
torch.jit.save(torch.jit.script(mylib.Net()), root + "/train.pt")

torch.jit.save(torch.jit.script(mylib.double), root + "/function.pt")
torch.jit.save(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(64, 2), torch.nn.ReLU())), root + "/list.pt")
torch.jit.save(torch.jit.script(torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(64, 8)),
                                {torch.nn.Linear}, torch.qint8)), root + "/quantised.pt")
torch.save(torch.nn.Linear(64, 64).state_dict(), root + "/linear.pt")
"""

HELPERS = """
import warnings
warnings.simplefilter("ignore")
import io, mylib, re
plain = getattr(torch.jit.load, "__wrapped__", torch.jit.load)
x = torch.linspace(-1, 1, 128).reshape(2, 64)

def graphs(m):
    return [[name, str(part._c._get_method(name).graph), part._c._get_method(name).code]
            for _, part in m.named_modules() for name in sorted(part._c._method_names())]

def facts(m):
    shared = [[a, b] for a, p in m.state_dict(keep_vars=True).items() for b, q in m.state_dict(keep_vars=True).items()
              if a < b and p.data_ptr() == q.data_ptr()]
    return [graphs(m), str(m.inlined_graph), repr(m), type(m).__name__, shared,
            [[n, type(p).__name__, p.requires_grad, p.is_leaf, list(p.stride())] for n, p in m.named_parameters()],
            [[n, describe(b)] for n, b in m.named_buffers()], sorted(vars(m)), getattr(m, "training", None)]

def uses(m):
    '''The output, what freezing gives, and what saving and loading again gives.'''
    out = [describe(m(x)), describe(m(x))]
    if not getattr(m, "training", True):
        frozen = torch.jit.freeze(m)
        out += [describe(frozen(x)), re.sub("0x[0-9a-f]+", "", str(frozen.graph))]
    file = io.BytesIO()
    torch.jit.save(m, file)
    again = plain(io.BytesIO(file.getvalue()))
    return [*out, describe(again(x)), graphs(again), len(file.getvalue())]
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    (folder / "mylib.py").write_text(MYLIB)
    start = rooted(folder) + HELPERS
    oracle.nat(start + MAKE)
    return start


@pytest.mark.parametrize("name", ["script", "trace", "frozen", "train", "function", "list", "quantised"])
def test_loads(oracle: Oracle, before: str, name: str) -> None:
    run = oracle.hit(before + f"m = torch.jit.load(root + '/{name}.pt')\nvalue = [facts(m), uses(m)]")
    assert run.records[0][2] == "torch.jit.load"


def test_extra_files_are_filled_in(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
value = []
for names in (["k"], ["bytes", "k", "absent"], []):
    files = dict.fromkeys(names, "before")
    same = files
    m = torch.jit.load(root + "/script.pt", _extra_files=files)
    value.append([[name, describe(content)] for name, content in files.items()])
    assert files is same
"""
    )
    assert [len(found) for found in run.value] == [1, 3, 0]
    assert run.records[0][3] != run.records[1][3], "other names are another request"


def test_map_location_and_odd_arguments(oracle: Oracle, before: str) -> None:
    oracle.hit(before + "m = torch.jit.load(root + '/script.pt', map_location='cpu')\nvalue = facts(m)")
    oracle.by(
        before
        + """
value = []
with open(root + "/script.pt", "rb") as file:
    value.append(describe(torch.jit.load(io.BytesIO(file.read()))(x)))
m = torch.jit.load(root + "/script.pt", map_location="meta")
value.append(sorted(str(p.device) for p in m.parameters()))
for path in ("/absent.pt", "/mylib.py", ""):
    try:
        torch.jit.load(root + path)
    except Exception as error:
        value.append([type(error).__name__, str(error).splitlines()[0]])
"""
    )


def test_writes_are_isolated(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
m = torch.jit.load(root + "/script.pt")
right = m(x)
with torch.no_grad():
    m.first.lin.weight.zero_()
changed = [bool((m(x) != right).any()), bool((m.second.lin.weight == 0).all())]
n = torch.jit.load(root + "/script.pt")
m.first.scale = torch.zeros(64)
value = [*changed, torch.equal(n(x), right), describe(n(x)), n is not m]
"""
    )
    assert run.value[:3] == [True, True, True]


def test_training(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
m = torch.jit.load(root + "/train.pt")
optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
losses = []
for _ in range(3):
    loss = m(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
m.eval()
value = [losses, m.training, m.first.training]
"""
    )
    assert run.value[1:] == [False, False]


def test_inside_other_objects(oracle: Oracle, before: str) -> None:
    oracle.hit(
        before
        + """
m = load(mylib.holder, root + "/script.pt", root + "/linear.pt")
value = [describe(m(x)), facts(m.script), sorted(m.state_dict()), type(m).__name__]
m.eval()
value.append([m.script.training, m.script.first.training])
"""
    )


@pytest.mark.parametrize("how", ["scripted", "traced", "frozen"])
def test_compiled_by_the_load_itself(oracle: Oracle, before: str, how: str) -> None:
    """Names of values differ from those of the compilation: what it computes, holds and is does not."""
    oracle.hit(
        before
        + f"""
m = load(mylib.compiled, {how!r}, root + "/linear.pt")
value = [describe(m(x)), type(m).__name__, repr(m), [type(part).__name__ for part in m.modules()],
         [[n, type(p).__name__, describe(p)] for n, p in m.named_parameters()], sorted(m.state_dict())]
"""
    )


def test_weights_are_mapped_not_copied(oracle: Oracle, before: str) -> None:
    body = (
        before
        + """
import resource
from torch import nn
big = root + "/big.pt"
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
torch.jit.load(root + "/script.pt")
start = rss()
m = torch.jit.load(big)
grown = rss() - start
weights = sum(p.numel() * 4 for p in m.parameters())
value = m(torch.ones(1, 4096)).sum().item()
"""
    )
    oracle.nat(
        before + "torch.jit.save(torch.jit.script(torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False)"
        " for _ in range(3)])), root + '/big.pt')"
    )
    oracle.run(body)
    run = oracle.run(body + "value = [grown, weights]")
    assert run.outcomes == ["hit", "hit"], run.records
    assert run.value[0] < run.value[1] * 0.05
