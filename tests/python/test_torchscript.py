# SPDX-License-Identifier: MIT
"""A restored TorchScript module compiles its code when it is first used, whoever uses it first and how."""

from __future__ import annotations

import copy
import io
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from overmind import skeleton
from overmind.quirks import torchscript
from segments import copy_of, segment_of
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


def write_of_version(module: Any, version: int, path: Path) -> None:
    """As torch.jit.save, with that version in the archive."""
    written = io.BytesIO()
    torch.jit.save(module, written)
    with zipfile.ZipFile(written) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, f"{version}\n" if name.endswith("version") else source.read(name))


def by_file(path: Path) -> tuple[Any, Any]:
    """The module of a file, as it is loaded natively and as it is restored."""
    native = torch.jit.load(path)
    return native, skeleton.restore(segment_of(skeleton.take(native, {}, [], str(path))), [])


@pytest.mark.parametrize("version", [3, 10])
def test_operators_mean_what_they_natively_mean(version: int, tmp_path: Path) -> None:
    write_of_version(torch.jit.script(Versioned()), version, tmp_path / "m.pt")
    native, restored = by_file(tmp_path / "m.pt")
    assert str(restored.inlined_graph) == str(native.inlined_graph)
    x = torch.arange(4)
    for ours, theirs in zip(restored(x, 3), native(x, 3), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert (native(x, 3)[0][1] == 0) == (version == 3)  # it did divide so


def test_code_that_is_printed_anew_is_of_today() -> None:
    native = loaded(torch.jit.script(Versioned()))
    assert str(copy_of(native).inlined_graph) == str(native.inlined_graph)


class Parts(nn.Module):
    """Attributes of many kinds; a weight that two layers share, and a view of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("row", self.first.weight.detach()[2])
        self.register_buffer("absent", None)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        self.number, self.name = 3, "parts"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.second(self.first(x)) + self.row * self.number + torch.tensor([0.5, 1.5, 2.5, 3.5])


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tensors = [torch.ones(4), torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.tensors[0]


def _frozen() -> Any:
    return torch.jit.freeze(torch.jit.script(Net().eval()))


FILES: dict[str, tuple[Callable[[], Any], bool]] = {
    "scripted": (lambda: torch.jit.script(Net()), True),
    "traced": (lambda: torch.jit.trace(Net(), X), True),
    "parts": (lambda: torch.jit.script(Parts()), True),
    "tensors in a list": (lambda: torch.jit.script(Lists()), False),
    "frozen, with big constants": (_frozen, False),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_gives_its_own_code(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not sure to be plain is printed anew; both come back as they were loaded."""
    make, plain = FILES[kind]
    torch.jit.save(make(), tmp_path / "m.pt")
    printed: list[Any] = []
    write = torchscript.write_archive
    monkeypatch.setattr(torchscript, "write_archive", lambda *args: printed.append(args) or write(*args))
    native, restored = by_file(tmp_path / "m.pt")
    assert bool(printed) != plain
    assert str(restored.inlined_graph) == str(native.inlined_graph)
    x = torch.linspace(-1, 1, 4) if kind in ("parts", "tensors in a list") else X
    assert torch.equal(restored(x), native(x))
    names = [name for name, _ in native.named_parameters()]
    assert [name for name, _ in restored.named_parameters()] == names
    for (_, ours), (_, theirs) in zip(restored.state_dict().items(), native.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    if kind == "parts":
        with torch.no_grad():
            restored.first.weight[2, 0] = 7.0
        assert restored.second.weight[2, 0] == 7.0 and restored.row[0] == 7.0
        assert native.first.weight[2, 0] != 7.0
