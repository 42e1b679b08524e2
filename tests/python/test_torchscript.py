# SPDX-License-Identifier: MIT
"""A restored TorchScript module compiles its code when it is first used, whoever uses it first and how."""

from __future__ import annotations

import copy
import io
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from overmind.quirks import torchscript
from segments import copy_of
from torch import nn

X = torch.linspace(-1, 1, 128).reshape(2, 64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale


class Packed(nn.Module):
    """Its code calls operators that are not torch's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.add(x, x, 1.0, 0)


@pytest.fixture(autouse=True)
def forget_types() -> Iterator[None]:
    """torch remembers the type of every module that was scripted, and with it the constants of a frozen one."""
    yield
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    torch._C._jit_clear_class_registry()


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return torch.jit.load(io.BytesIO(file.getvalue()))


@pytest.fixture(params=["scripted", "traced", "frozen"])
def native(request: pytest.FixtureRequest) -> Any:
    net = Net().eval()
    module = torch.jit.trace(net, X) if request.param == "traced" else torch.jit.script(net)
    return loaded(torch.jit.freeze(module) if request.param == "frozen" else module)


USES: dict[str, Callable[[Any], Any]] = {
    "call": lambda m: m(X),
    "graph": lambda m: str(m.graph),
    "print": repr,
    "state": lambda m: {name: value.tolist() for name, value in m.state_dict().items()},
    "parts": lambda m: [name for name, _ in m.named_modules()],
    "training": lambda m: [getattr(m.train(), "training", None)],
    "has": lambda m: [hasattr(m, "lin"), hasattr(m, "absent"), hasattr(m, "_c"), "lin" in dir(m)],
    "copy": lambda m: copy.deepcopy(m)(X),
    "shallow copy": lambda m: copy.copy(m)(X),
    "save": lambda m: loaded(m)(X),
    "freeze": lambda m: str(torch.jit.freeze(m).graph) if getattr(m, "training", True) is False else None,
    "cast": lambda m: m.double()(X.double()),
    "again": lambda m: copy_of(m)(X),
    "in a list": lambda m: nn.Sequential(m, m)(X),
    "set": lambda m: [setattr(m, "note", 1), vars(m)["note"]],
    "scripted again": lambda m: torch.jit.script(nn.Sequential(m))(X),
}


def _outcome(use: Callable[[Any], Any], module: Any) -> Any:
    try:
        return use(module)
    except RuntimeError as error:
        return type(error)  # a frozen module can't be cast


@pytest.mark.parametrize("use", USES)
def test_the_first_use_gives_what_it_natively_gives(native: Any, use: str) -> None:
    restored = copy_of(native)
    assert torchscript.PENDING in vars(restored)
    got, right = _outcome(USES[use], restored), _outcome(USES[use], native)
    assert torch.equal(got, right) if isinstance(right, torch.Tensor) else got == right
    assert torchscript.PENDING not in vars(restored)
    assert vars(restored).keys() - {"forward"} == vars(native).keys() - {"forward"}


def test_two_threads_get_one_module(native: Any) -> None:
    restored = copy_of(native)
    gate, found = threading.Barrier(4), []

    def use() -> None:
        gate.wait()
        found.append((id(restored._c), restored(X)))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number for number, _ in found}) == 1
    assert all(torch.equal(out, native(X)) for _, out in found)


def test_modes_of_the_first_use_do_not_stick() -> None:
    native = loaded(torch.jit.script(Net()))
    restored = copy_of(native)
    with torch.inference_mode(), torch.device("meta"):
        assert restored.lin.weight.device.type == "cpu"
    assert not restored.lin.weight.is_inference()
    assert [p.requires_grad for p in restored.parameters()] == [p.requires_grad for p in native.parameters()]
    restored(X).sum().backward()
    assert restored.lin.weight.grad is not None


def test_code_of_another_library_is_compiled_at_once() -> None:
    """Natively it is the load that fails if that library was not imported."""
    assert torchscript.PENDING not in vars(copy_of(loaded(torch.jit.script(Packed()))))


def test_an_unfinished_module_is_what_it_was() -> None:
    """The descriptors in torch's class change nothing for modules that no hit gave."""
    copy_of(loaded(torch.jit.script(Net())))
    with pytest.raises(AttributeError):
        torch.jit.RecursiveScriptModule._c  # noqa: B018
    bare = torch.jit.RecursiveScriptModule.__new__(torch.jit.RecursiveScriptModule)
    with pytest.raises(RuntimeError, match="not been initialized"):
        bare.anything  # noqa: B018


class Versioned(nn.Module):
    """Operators that older torches had with another meaning: an archive says of which torch its code is."""

    def forward(self, x: torch.Tensor, n: int) -> list[torch.Tensor]:
        quotient = x.float()
        quotient.div_(n)
        quotient = torch.div(quotient, n, rounding_mode="floor")
        return [
            torch.div(x, n), x / 2, quotient, torch.full([2], n), torch.full([2], True),
            torch.linspace(0, 1, 3), torch.logspace(0, 1, 3), torch.nn.functional.gelu(x.float()),
        ]  # fmt: skip


def of_version(module: Any, version: int) -> Any:
    """As loaded(), with that version in the archive."""
    written, changed = io.BytesIO(), io.BytesIO()
    torch.jit.save(module, written)
    with zipfile.ZipFile(written) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, f"{version}\n" if name.endswith("version") else source.read(name))
    return torch.jit.load(io.BytesIO(changed.getvalue()))


@pytest.mark.parametrize("version", [10])
def test_operators_mean_what_they_natively_mean(version: int) -> None:
    native = of_version(torch.jit.script(Versioned()), version)
    restored = copy_of(native)
    assert str(restored.inlined_graph) == str(native.inlined_graph)
    x = torch.arange(4)
    for ours, theirs in zip(restored(x, 3), native(x, 3), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert (native(x, 3)[0][1] == 0) == (version == 3)  # it did divide so
