# SPDX-License-Identifier: MIT
"""S12: a checkpoint that needs a class, or a permission, that only this notebook has.

`torch.load` of a whole module looks its class up in `__main__`; a daemon that loads for the user has another
`__main__`. And `torch.serialization.add_safe_globals` is a permission of one process: a cache that answers a load from
a process that never gave it has switched a safety check off.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import BEFORE

NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2, bias=False)
        self.extra = "made"
    def forward(self, x):
        return self.inner(x) + {plus}
"""
CFG = """
class Cfg:
    def __init__(self, width):
        self.width = width
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    start = f"root = {str(folder)!r}\n{BEFORE}\n"
    oracle.nat(
        start
        + NET.format(plus=1)
        + CFG
        + """
net = Net()
with torch.no_grad():
    net.inner.weight.fill_(1.0)
torch.save(net, root + "/net.pt")
torch.save({"cfg": Cfg(7), "w": torch.ones(2)}, root + "/cfg.pt")
"""
    )
    return start


LOAD_NET = """
m = torch.load(root + "/net.pt", weights_only=False)
value = [type(m) is Net, m(torch.ones(1, 2)).tolist(), m.extra, type(m).__module__, m.training]
"""


def test_saved_and_loaded_in_one_notebook(oracle: Oracle, before: str) -> None:
    run = oracle.by(before + NET.format(plus=1) + "torch.save(Net(), root + '/own.pt')\n" + LOAD_NET)
    assert run.value == [True, [[3.0, 3.0]], "made", "__main__", True]


def test_another_notebook_with_another_class_of_that_name(oracle: Oracle, before: str) -> None:
    """Never the code, and never the state, of the notebook that cached it."""
    assert oracle.by(before + NET.format(plus=1) + LOAD_NET).value[1] == [[3.0, 3.0]]
    assert oracle.by(before + NET.format(plus=5) + LOAD_NET).value[1] == [[7.0, 7.0]]
    with_state = (
        NET.format(plus=1)
        + """
    def __setstate__(self, state):
        super().__setstate__(state)
        self.extra = "restored"
"""
    )
    assert oracle.by(before + with_state + LOAD_NET).value[2] == "restored"


def test_a_notebook_without_the_class(oracle: Oracle, before: str) -> None:
    oracle.by(before + NET.format(plus=1) + LOAD_NET)
    body = (
        before
        + """
try:
    torch.load(root + "/net.pt", weights_only=False)
    value = "loaded"
except Exception as error:
    value = [type(error).__name__, str(error)]
"""
    )
    native = oracle.nat(body).value
    assert native[0] == "AttributeError"
    assert oracle.run(body).value == native


LOAD_CFG = """
import pickle
try:
    d = torch.load(root + "/cfg.pt")
    value = [type(d["cfg"]) is Cfg, d["cfg"].width, d["w"].tolist()]
except Exception as error:
    value = [type(error).__name__, isinstance(error, pickle.UnpicklingError), str(error)]
"""
ALLOW = "torch.serialization.add_safe_globals([Cfg])\n"


def test_a_permission_of_this_process_only(oracle: Oracle, before: str) -> None:
    allowed = oracle.by(before + CFG + ALLOW + LOAD_CFG)
    assert allowed.value == [True, 7, [1.0, 1.0]]
    refused = before + CFG + LOAD_CFG
    native = oracle.nat(refused).value
    assert native[1] is True and "weights_only" in native[2]
    for _ in range(2):
        run = oracle.run(refused)
        assert run.value == native and "hit" not in run.outcomes
    assert oracle.by(before + CFG + ALLOW + LOAD_CFG).value == [True, 7, [1.0, 1.0]]


def test_a_permission_for_one_block_only(oracle: Oracle, before: str) -> None:
    inside = LOAD_CFG.replace("\n", "\n    ")
    body = (
        before
        + CFG
        + "with torch.serialization.safe_globals([Cfg]):"
        + inside
        + "\nfirst = value"
        + LOAD_CFG
        + "value = [first, value]"
    )
    native = oracle.nat(body).value
    assert native[0] == [True, 7, [1.0, 1.0]] and native[1][1] is True
    assert oracle.run(body).value == native
    assert oracle.run(body).value == native


def test_permission_taken_back(oracle: Oracle, before: str) -> None:
    body = before + CFG + ALLOW + LOAD_CFG + "first = value\ntorch.serialization.clear_safe_globals()" + LOAD_CFG
    native = oracle.nat(body + "value = [first, value]").value
    assert native[0] == [True, 7, [1.0, 1.0]] and native[1][1] is True
    assert oracle.run(body + "value = [first, value]").value == native
    assert oracle.run(body + "value = [first, value]").value == native


def test_the_whole_file_is_another_load(oracle: Oracle, before: str) -> None:
    """weights_only=False must not open the door for weights_only=True."""
    open_door = before + CFG + "value = torch.load(root + '/cfg.pt', weights_only=False)['cfg'].width"
    assert oracle.by(open_door).value == 7
    refused = before + CFG + LOAD_CFG
    native = oracle.nat(refused).value
    assert native[1] is True and oracle.run(refused).value == native
    forced = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    assert oracle.by(refused, env=forced).value == [True, 7, [1.0, 1.0]]
    assert oracle.run(refused).value == native


LIB = """
import torch


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2,), 4.0))

    def forward(self, x):
        return x + self.w{plus}
"""


def test_a_module_beside_the_notebook(oracle: Oracle, before: str, folder: Path) -> None:
    """sys.path.append("./lib") in a cell; the module is edited in between."""
    (folder / "lib").mkdir()
    source = folder / "lib" / "parts_of_mine.py"
    source.write_text(LIB.format(plus=""))
    path = "import sys\nsys.path.append('./lib')\n"
    oracle.nat(
        before + path + "import parts_of_mine\ntorch.save(parts_of_mine.Part(), root + '/part.pt')", cwd=str(folder)
    )
    body = (
        before
        + path
        + "m = torch.load(root + '/part.pt', weights_only=False)\nimport parts_of_mine\n"
        + "value = [type(m) is parts_of_mine.Part, m(torch.zeros(2)).tolist()]"
    )
    assert oracle.hit(body, cwd=str(folder)).value == [True, [4.0, 4.0]]
    source.write_text(LIB.format(plus=" + 100"))
    assert oracle.by(body, cwd=str(folder)).value == [True, [104.0, 104.0]]
    missing = body.replace("sys.path.append('./lib')", "pass").replace("import parts_of_mine\n", "")
    native = oracle.nat(missing, cwd=str(folder), check=False)
    run = oracle.run(missing, cwd=str(folder), check=False)
    assert native.returncode == run.returncode == 1
    assert "ModuleNotFoundError" in native.stderr and "ModuleNotFoundError" in run.stderr
