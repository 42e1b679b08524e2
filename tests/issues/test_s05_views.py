# SPDX-License-Identifier: MIT
"""S05: several views of one storage.

`torch.save` keeps which tensors share memory, their strides and offsets. A cache that stores each tensor's bytes loses
the sharing (and writes the memory several times); one that merges tensors with equal bytes invents sharing that was
never there. Both change what an in-place write does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import BEFORE

FACTS = """
def facts(tensors):
    return [[list(t.shape), list(t.stride()), t.storage_offset(), str(t.dtype), t.untyped_storage().nbytes()]
            for t in tensors]

def groups(tensors):
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(p) for p in places]
"""


def prepared(oracle: Oracle, folder: Path, make: str) -> str:
    start = f"root = {str(folder)!r}\n{BEFORE}\n{FACTS}\n"
    oracle.nat(start + make)
    return start


VIEWS = """
x = torch.arange(8.0)
torch.save([x[:4], x[2:6], x[::2], x.view(2, 4).t(), x[:1].expand(5)], root + "/v.pt")
"""


def test_views_of_one_storage(oracle: Oracle, folder: Path) -> None:
    before = prepared(oracle, folder, VIEWS)
    run = oracle.hit(
        before
        + """
v = torch.load(root + "/v.pt")
value = [facts(v), groups(v)]
v[0][2] = 99
value += [[t.tolist() for t in v], describe(v)]
"""
    )
    facts, groups, lists, _all = run.value
    assert groups == [0] * 5, "they all share one storage"
    assert facts == [
        [[4], [1], 0, "torch.float32", 32],
        [[4], [1], 2, "torch.float32", 32],
        [[4], [2], 0, "torch.float32", 32],
        [[4, 2], [1, 4], 0, "torch.float32", 32],
        [[5], [0], 0, "torch.float32", 32],
    ]
    assert lists[0] == [0, 1, 99, 3] and lists[1] == [99, 3, 4, 5] and lists[2] == [0, 99, 4, 6]
    assert lists[3] == [[0, 4], [1, 5], [99, 6], [3, 7]] and lists[4] == [0.0] * 5


def test_memory_is_not_duplicated(oracle: Oracle, folder: Path) -> None:
    before = prepared(
        oracle, folder, "x = torch.arange(250_000.)\ntorch.save([x[i:] for i in range(20)], root + '/v.pt')"
    )
    run = oracle.hit(before + "v = torch.load(root + '/v.pt')\nvalue = [groups(v), v[0].untyped_storage().nbytes()]")
    assert run.value == [[0] * 20, 1_000_000]
    assert 1_000_000 <= run.records[-1][4] < 1_100_000, "the entry holds the storage once"


def test_equal_bytes_are_not_an_alias(oracle: Oracle, folder: Path) -> None:
    before = prepared(
        oracle,
        folder,
        "torch.save([torch.ones(1000), torch.ones(1000), torch.zeros(2), torch.zeros(2)], root + '/v.pt')",
    )
    run = oracle.hit(
        before
        + "v = torch.load(root + '/v.pt')\nv[0].fill_(5)\nv[2].fill_(6)\n"
        + "value = [groups(v), [float(t[0]) for t in v]]"
    )
    assert run.value == [[0, 1, 2, 3], [5.0, 1.0, 6.0, 0.0]]


def test_empty_scalar_and_partly_seen_storages(oracle: Oracle, folder: Path) -> None:
    make = """
whole = torch.arange(100.0)
empty = torch.empty(0, 3)
torch.save([empty, torch.tensor(3.0), whole[10:20], torch.empty(2, 0), whole[5], empty, torch.tensor([])[:0]],
           root + "/v.pt")
"""
    before = prepared(oracle, folder, make)
    run = oracle.hit(
        before
        + """
v = torch.load(root + "/v.pt")
value = [facts(v), v[0] is v[5]]
v[4].fill_(-1)
v[2].add_(1)
value += [[t.tolist() for t in v], describe(v)]
"""
    )
    facts = run.value[0]
    assert facts[0][0] == [0, 3] and facts[0][4] == 0
    assert facts[1] == [[], [], 0, "torch.float32", 4]
    assert facts[2][2:] == [10, "torch.float32", 400] and facts[4][2:] == [5, "torch.float32", 400]
    assert run.value[1] is True
    assert run.value[2][4] == -1 and run.value[2][2] == [11.0 + i for i in range(10)]


MYLIB = """
import torch


def views(path):
    x = torch.load(path)
    return {"x": x, "bits": x.view(torch.int32), "bytes": x[2:4].view(torch.uint8),
            "pairs": torch.view_as_complex(x.view(4, 2)),
            "parameter": torch.nn.Parameter(x[:4]), "reversed": x.as_strided((3,), (2,), 1)}
"""


def test_views_of_other_types(oracle: Oracle, folder: Path) -> None:
    """torch.save refuses these; a loader may return them."""
    (folder / "mylib.py").write_text(MYLIB)
    before = prepared(oracle, folder, "torch.save(torch.arange(8.0), root + '/x.pt')")
    run = oracle.hit(
        before
        + """
sys.path.insert(0, root)
import mylib
v = load(mylib.views, root + "/x.pt")
value = [groups(list(v.values())), facts(list(v.values()))]
v["x"][2] = 99
value += [v["bits"][2].item(), v["bytes"][:4].tolist(), v["pairs"][1].real.item(), v["parameter"][2].item(),
          v["reversed"].tolist(), describe(v)]
"""
    )
    groups, facts, bits, raw, real, parameter, strided, _all = run.value
    assert groups == [0] * 6
    types = ["float32", "int32", "uint8", "complex64", "float32", "float32"]
    assert [fact[3] for fact in facts] == [f"torch.{name}" for name in types]
    assert facts[2][2] == 8, "the offset counts in the view's own type"
    assert bits == 1120272384 and raw == [0, 0, 198, 66], "the bits of 99.0"
    assert real == 99 and parameter == 99 and strided == [1, 3, 5]


def test_saving_views_of_other_types_raises_as_native(oracle: Oracle, folder: Path) -> None:
    before = prepared(oracle, folder, VIEWS)
    run = oracle.hit(
        before
        + """
v = torch.load(root + "/v.pt")
try:
    torch.save([v[0], v[0].view(torch.int32)], root + "/again.pt")
    value = "no error"
except RuntimeError as error:
    value = str(error)
"""
    )
    assert "view the same data as different types" in run.value


def test_a_module_and_a_view_of_its_weight(oracle: Oracle, folder: Path) -> None:
    make = """
net = torch.nn.Linear(4, 4)
torch.save({"net": net, "row": net.weight.detach()[1], "same": net.weight, "end": net.bias.data[2:]}, root + "/v.pt")
"""
    before = prepared(oracle, folder, make)
    run = oracle.hit(
        before
        + """
v = torch.load(root + "/v.pt", weights_only=False)
with torch.no_grad():
    v["net"].weight[1].fill_(7)
    v["net"].bias.zero_()
value = [v["row"].tolist(), v["same"] is v["net"].weight, v["end"].tolist(), v["row"].requires_grad, describe(v)]
"""
    )
    assert run.value[:4] == [[7.0] * 4, True, [0.0] * 2, False]


@pytest.mark.parametrize("option", ["", ", mmap=True"])
def test_each_load_is_its_own(oracle: Oracle, folder: Path, option: str) -> None:
    """A bypass is right with mmap=True: the native load reads nothing."""
    before = prepared(oracle, folder, VIEWS)
    ask = oracle.by if option else oracle.hit
    run = ask(
        before
        + f"a = torch.load(root + '/v.pt'{option})\nb = torch.load(root + '/v.pt'{option})\n"
        + "a[0][0] = 50\nvalue = [groups([a[0], b[0]]), a[2][0].item(), b[2][0].item()]"
    )
    assert run.value == [[0, 1], 50.0, 0.0]
