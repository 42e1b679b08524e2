# SPDX-License-Identifier: MIT
"""S02: a module with a parametrisation can't be pickled.

`torch.nn.utils.parametrizations` gives a module a class made on the spot, whose `__getstate__` raises: "Serialization
of parametrized modules is only supported through state_dict()". A cache that pickles results fails the user's load
there. One that works around it by storing the computed weight gives a module whose parametrisation is dead: a change
of `original0` no longer changes the output. The old-style `weight_norm` is a hook and pickles; it must stay live too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

MYLIB = """
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def _filled(path):
    net = nn.Sequential(nn.utils.skip_init(nn.Linear, 3, 4))
    net.load_state_dict(torch.load(path))
    return net


def new_style(path):
    net = _filled(path)
    parametrizations.weight_norm(net[0])
    return net


def old_style(path):
    net = _filled(path)
    nn.utils.weight_norm(net[0])
    return net


def spectral(path):
    net = _filled(path)
    parametrizations.spectral_norm(net[0])
    return net.eval()


def own(path):
    net = _filled(path)
    parametrize.register_parametrization(net[0], "weight", Doubled())
    return net
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    """Assignments and imports that each program begins with; the files they speak of are there."""
    (folder / "mylib.py").write_text(MYLIB)
    start = rooted(folder)
    oracle.nat(
        start
        + "torch.save({'0.weight': torch.arange(12.).reshape(4, 3) - 5, '0.bias': torch.zeros(4)}, root + '/w.pt')"
    )
    return start + "import mylib\nx = torch.ones(1, 3)\n"


def test_weight_norm_is_live(oracle: Oracle, before: str) -> None:
    run = oracle.by(
        before
        + """
m = load(mylib.new_style, root + "/w.pt")
names = sorted(name for name, _ in m.named_parameters())
was = m(x)
with torch.no_grad():
    m[0].parametrizations.weight.original0.mul_(2)
ratio = (m(x) / was).tolist()
torch.nn.utils.parametrize.remove_parametrizations(m[0], "weight")
plain = sorted(name for name, _ in m.named_parameters())
value = [names, was.tolist(), ratio, plain, type(m[0]).__name__, m[0].weight.tolist()]
"""
    )
    names, was, ratio, plain, kind, _weight = run.value
    assert names == ["0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"]
    assert was[0] == pytest.approx([-12, -3, 6, 15])
    assert ratio[0] == pytest.approx([2, 2, 2, 2])
    assert plain == ["0.bias", "0.weight"] and kind == "Linear"


def test_old_weight_norm_is_live(oracle: Oracle, before: str) -> None:
    run = oracle.by(
        before
        + """
m = load(mylib.old_style, root + "/w.pt")
was = m(x)
with torch.no_grad():
    m[0].weight_g.mul_(2)
ratio = (m(x) / was).tolist()
torch.nn.utils.remove_weight_norm(m[0])
value = [ratio, sorted(name for name, _ in m.named_parameters()), describe(m)]
"""
    )
    assert run.value[0][0] == pytest.approx([2, 2, 2, 2])
    assert run.value[1] == ["0.bias", "0.weight"]


def test_spectral_norm_and_an_own_parametrisation(oracle: Oracle, before: str) -> None:
    run = oracle.by(
        before
        + """
torch.manual_seed(0)
a = load(mylib.spectral, root + "/w.pt")
b = load(mylib.own, root + "/w.pt")
norm = torch.linalg.matrix_norm(a[0].weight, 2).item()
was = b(x)
b[0].weight = torch.ones(4, 3)
value = [norm, was.tolist(), b[0].weight.tolist(), b[0].parametrizations.weight.original.tolist(), torch.rand(1).item()]
"""
    )
    norm, was, weight, original, _drawn = run.value
    assert norm == pytest.approx(1, abs=0.05)
    assert was[0] == [-12, -3, 6, 15]
    assert weight == [[1.0] * 3] * 4 and original == [[0.5] * 3] * 4


def test_a_saved_parametrised_module_raises_as_native(oracle: Oracle, before: str) -> None:
    """The user's own attempt to pickle it still gets torch's own words."""
    run = oracle.by(
        before
        + """
import pickle
m = load(mylib.new_style, root + "/w.pt")
try:
    pickle.dumps(m)
    value = "no error"
except Exception as error:
    value = [type(error).__name__, str(error)]
"""
    )
    assert run.value[0] == "RuntimeError" and "parametrized modules" in run.value[1]
