# SPDX-License-Identifier: MIT
"""Objects taken apart and built again, by overmind._torch and by its Python fallback: the same answers from both."""

from __future__ import annotations

import collections
import gc
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from overmind import _core, _torch, log, skeleton, torch_fallback
from segments import copy_of, segment_of
from torch import nn


@pytest.fixture(params=["_torch", "fallback"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fallback":
        monkeypatch.setattr(skeleton, "_backend", lambda needs_torch: torch_fallback)
    return str(request.param)


def refusal(value: Any) -> str:
    with pytest.raises(skeleton.Unsupported) as caught:
        skeleton.take(value, {}, [])
    return str(caught.value)


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    facts: tuple[Any, ...] = (
        type(tensor),
        tensor.dtype,
        tensor.layout,
        tuple(tensor.shape),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.device,
        tensor.is_inference(),
        tensor.__dict__,
    )
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return facts
    storage = tensor.untyped_storage()
    return (
        *facts,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
        storage.nbytes(),
        storage.resizable(),
        bytes(storage.tolist()),
    )


def with_attributes(tensor: torch.Tensor, **values: Any) -> torch.Tensor:
    tensor.__dict__.update(values)
    return tensor


class Fancy(torch.Tensor):
    pass


PLAIN_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]  # fmt: skip

TENSORS = {
    **{str(dtype): lambda dtype=dtype: torch.arange(48, dtype=torch.uint8).view(dtype) for dtype in PLAIN_DTYPES},
    "bool": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "empty with storage": lambda: torch.ones(4)[:0],
    "offset and strides": lambda: torch.arange(24.0).reshape(4, 6)[1:, ::2].t(),
    "expanded": lambda: torch.ones(1, 3).expand(5, 3),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "trainable": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "frozen parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "buffer": lambda: nn.Buffer(torch.ones(2)),
    "marked parameter": lambda: with_attributes(
        nn.Parameter(torch.ones(2)), _is_hf_initialized=True, n=1, f=0.5, s="x", z=None
    ),
    "parameter with a list": lambda: with_attributes(nn.Parameter(torch.ones(2)), sizes=[1, 2]),
    "tensor with a list": lambda: with_attributes(torch.ones(2, requires_grad=True), sizes=[1, 2]),
    "property in __dict__": lambda: with_attributes(torch.ones(2), is_leaf="not it"),
    "not resizable": lambda: torch.frombuffer(bytearray(b"abcdefgh"), dtype=torch.uint8),
    "conj": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "neg": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.empty(3, device="meta"),
    "subclass": lambda: torch.ones(2).as_subclass(Fancy),
    "pieces of one storage": lambda: torch.ones(10).split(3)[1],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name: str) -> None:
    value = TENSORS[name]()
    before = facts(value)
    assert facts(copy_of(value)) == before
    assert facts(value) == before


@pytest.mark.parametrize("layout", ["sparse", "csr", "quantised", "per channel"])
def test_tensors_that_go_the_way_of_pickle(layout: str) -> None:
    dense = torch.eye(4)
    value = {
        "sparse": lambda: dense.to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
        "quantised": lambda: torch.quantize_per_tensor(dense, 0.1, 3, torch.quint8),
        "per channel": lambda: torch.quantize_per_channel(dense, torch.ones(4), torch.zeros(4), 0, torch.qint8),
    }[layout]()
    again = copy_of(value)
    assert facts(again)[:8] == facts(value)[:8]
    assert torch.equal(again.to_dense() if layout in ("sparse", "csr") else again.dequantize(), dense)


def test_each_backend_builds_what_the_other_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [make() for make in TENSORS.values()]
    for packer, builder in ((_torch, torch_fallback), (torch_fallback, _torch)):
        monkeypatch.setattr(skeleton, "_backend", lambda needs_torch, module=packer: module)
        segment = segment_of(skeleton.take(values, {}, []))
        monkeypatch.setattr(skeleton, "_backend", lambda needs_torch, module=builder: module)
        assert [facts(value) for value in skeleton.restore(segment, [])] == [facts(value) for value in values]


class TestAliases:
    def test_what_was_shared_is_shared_and_nothing_else(self) -> None:
        base = torch.arange(12.0)
        tied = nn.Parameter(base)
        slow = with_attributes(base[2:5], note=[1])
        a = copy_of(
            {
                "base": base,
                "tied": tied,
                "again": tied,
                "slow": slow,
                "storage": base.untyped_storage(),
                "other": base.clone(),
            }
        )
        assert a["again"] is a["tied"] and a["tied"] is not a["base"]
        assert a["storage"] is a["base"].untyped_storage()
        for name in ("tied", "slow"):
            assert a[name].untyped_storage()._cdata == a["base"].untyped_storage()._cdata
        a["base"][3] = 99
        assert a["slow"][1] == 99 and a["tied"][3] == 99 and a["other"][3] == 3

    def test_two_copies_are_independent(self) -> None:
        segment = segment_of(skeleton.take(torch.zeros(4), {}, []))
        first, second = skeleton.restore(segment, []), skeleton.restore(segment, [])
        first += 1
        assert second.sum() == 0 or first.data_ptr() == second.data_ptr()

    def test_typed_storages_keep_their_identity(self) -> None:
        one = torch.ones(3)._typed_storage()
        a, b, c = copy_of([one, one, torch.ones(3)._typed_storage()])
        assert a is b and a is not c and a.dtype == torch.float32 and list(a) == [1, 1, 1]

    @pytest.mark.parametrize("kind", ["numpy and torch", "two views", "turned view", "storage slices", "object views"])
    def test_memory_shared_otherwise_is_refused(self, kind: str) -> None:
        array = np.arange(100.0)
        grid = np.arange(24.0).reshape(2, 3, 4)
        objects = np.array([1, "a", None], dtype=object)
        storage = torch.arange(100).untyped_storage()
        value = {
            "numpy and torch": lambda: [array, torch.from_numpy(array)],
            "two views": lambda: [array[:50], array[40:]],
            "turned view": lambda: [grid, grid.T],
            "storage slices": lambda: [
                torch.tensor([], dtype=torch.uint8).set_(storage[0:50]),
                torch.tensor([], dtype=torch.uint8).set_(storage[40:]),
            ],
            "object views": lambda: [objects, objects[:2]],
        }[kind]()
        assert "share memory" in refusal(value)

    def test_neighbours_are_no_overlap(self) -> None:
        array = np.arange(100.0)
        first, second = copy_of([array[:50], array[50:]])
        assert np.array_equal(first, array[:50]) and np.array_equal(second, array[50:])


class TaggedArray(np.ndarray):
    unit: str


class TestArrays:
    @pytest.mark.parametrize("make", [
        lambda: np.arange(20.0).reshape(4, 5), lambda: np.asfortranarray(np.ones((3, 4))),
        lambda: np.zeros(0), lambda: np.array(3),
        lambda: np.arange(24).reshape(2, 3, 4).T, lambda: np.array(["a", "bc"]),
        lambda: np.array([1, None], dtype=object),
        lambda: np.zeros(3, dtype=[("x", "i4"), ("y", "f8")]), lambda: np.ma.masked_array([1, 2], [True, False]),
    ])  # fmt: skip
    def test_arrays(self, make: Any) -> None:
        value = make()
        again = copy_of(value)
        assert type(again) is type(value) and again.dtype == value.dtype and again.flags.writeable
        assert again.strides == value.strides or value.size == 0
        assert np.array_equal(np.asarray(again), np.asarray(value))

    @pytest.mark.parametrize("make", [
        lambda: np.broadcast_to(np.arange(3), (4, 3)), lambda: np.arange(6)[::-1], lambda: np.arange(20)[::3],
        lambda: np.arange(12).reshape(3, 4)[:, ::2], lambda: np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
        lambda: np.ma.masked_array(np.arange(6)[::-1]),
    ])  # fmt: skip
    def test_a_layout_that_pickle_changes_is_refused(self, make: Any) -> None:
        assert "plain block" in refusal(make())

    def test_attributes_of_an_array_are_not_dropped(self) -> None:
        value = np.arange(4).view(TaggedArray)
        assert type(copy_of(value)) is TaggedArray
        value.unit = "m"
        assert "attributes pickle drops (unit)" in refusal(value)

    def test_a_read_only_array_of_objects_is_refused(self) -> None:
        value = np.array([None, 1], dtype=object)
        value.setflags(write=False)
        assert "read-only" in refusal(value)

    def test_read_only_stays_read_only(self) -> None:
        value = np.arange(5)
        value.setflags(write=False)
        assert not copy_of(value).flags.writeable

    def test_big_bytes_are_not_in_the_skeleton(self) -> None:
        snapshot = skeleton.take([np.zeros(10_000), torch.zeros(10_000)], {}, [])
        assert len(snapshot.skeleton) < 1000
        assert [nbytes for _, nbytes in snapshot.buffers] == [40_000, 80_000]
        assert snapshot.nbytes > 120_000


class Speaker:
    def speak(self) -> str:
        return "own"


class Loud(Speaker):
    def speak(self) -> str:
        return "loud"


def speak(_self: Any) -> str:
    return "other"


def _given_another_method() -> Speaker:
    speaker = Speaker()
    speaker.speak = types.MethodType(speak, speaker)  # type: ignore[method-assign]
    return speaker


REFUSED: dict[str, tuple[Any, str]] = {
    "another method": (_given_another_method, "speak of a Speaker"),
    "hidden method": (lambda: super(Loud, Loud()).speak, "speak of a Loud"),
    "free method": (lambda: types.MethodType(_twice, Speaker()), "_twice of a Speaker"),
    "gradient": (lambda: _trained()[0], "has a gradient"),
    "computed": (lambda: torch.ones(2, requires_grad=True) * 2, "autograd"),
    "hook": (lambda: _hooked(), "hooks"),
    "trainable subclass": (lambda: torch.ones(2).as_subclass(Fancy).requires_grad_(), "Fancy"),
    "parameter subclass": (lambda: type("Sub", (nn.Parameter,), {})(torch.ones(2)), "Sub"),
    "shared memory": (lambda: torch.ones(2).share_memory_(), "shared with other processes"),
    "lambda": (lambda: (lambda: 1), "lambda"),
    "local class": (lambda: type("Local", (), {"__module__": __name__, "__qualname__": "f.<locals>.Local"})(), "Local"),
    "generator": (lambda: (i for i in ()), "generator"),
    "lock": (lambda: threading.Lock(), "lock"),
    "open file": (lambda: open(__file__), "TextIOWrapper"),  # noqa: SIM115
    "module": (lambda: types, "module"),
    "script function": (lambda: torch.jit.script(_twice), "ScriptFunction"),
    "script with Python parts": (lambda: torch.jit.script(nn.Sequential(nn.ReLU())), "Python parts"),
    "script and its part": (lambda: _script_and(lambda net: net.inner), "holds as well"),
    "script and its tensor": (lambda: _script_and(lambda net: net.inner.weight), "something else"),
    "script with a gradient": (lambda: _script_and(lambda net: net(torch.ones(2)).sum().backward()), "gradient"),
    "script with a note": (lambda: _script_and(lambda net: setattr(net, "note", [1])), "(note)"),
    "traced graph": (lambda: torch.fx.symbolic_trace(nn.ReLU()), "GraphModule"),
    "parametrised": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized"),
    "optimizer": (lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)]), "optimizer"),
    "own error": (lambda: _Refuses(), "I will not"),
    "too deep": (lambda: _nested(100_000), "too deeply"),
}  # fmt: skip


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _script_and(more: Callable[[Any], Any]) -> list[Any]:
    net = torch.jit.script(Outer())
    return [net, more(net)]


class _Refuses:
    def __reduce__(self) -> Any:
        raise KeyError("I will not\nbe pickled")


def _trained() -> list[torch.Tensor]:
    tensor = torch.ones(2, requires_grad=True)
    tensor.sum().backward()
    return [tensor]


def _hooked() -> torch.Tensor:
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(print)
    return tensor


def _nested(depth: int) -> Any:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_pickle_would_lose_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    assert reason in refusal({"deep": [make()]})


def test_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert "inference mode" in refusal(tensor)


def test_a_class_of_main_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", kind, raising=False)
    assert "Mine" in refusal(kind())


class TestModules:
    def test_a_module_with_everything(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2)).eval()
        model[0].weight.requires_grad_(False)
        model[1].weight = model[1].bias
        again = copy_of(model)
        assert not again.training and not again[0].weight.requires_grad and again[1].weight is again[1].bias
        assert {n: facts(p) for n, p in again.named_parameters()} == {n: facts(p) for n, p in model.named_parameters()}
        assert list(again.state_dict()) == list(model.state_dict())
        assert all(
            torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
        )

    def test_hooks_registered_later_do_not_replace_restored_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch.utils.hooks import RemovableHandle

        model = nn.ReLU()
        monkeypatch.setattr(RemovableHandle, "next_id", 0)  # the first hook of this process, as of the next one
        model.register_forward_hook(_keep)
        segment = segment_of(skeleton.take(model, {}, []))
        monkeypatch.setattr(RemovableHandle, "next_id", 0)
        again = skeleton.restore(segment, [])
        again.register_forward_hook(_keep)
        assert len(again._forward_hooks) == 2

    def test_ordered_dicts(self) -> None:
        value = collections.OrderedDict(a=1)
        value.note = [value]  # type: ignore[attr-defined]
        again = copy_of([value, collections.OrderedDict()])
        assert again == [value, {}] and type(again[1]) is collections.OrderedDict and again[0].note[0] is again[0]


def _keep(*_: Any) -> None:
    return None


class TestSubstitutes:
    def test_the_callers_own_object_is_put_in(self) -> None:
        vae, config = nn.Linear(100, 100), {"a": 1}
        result = {"vae": vae, "list": [vae, config], "own": nn.Linear(2, 2)}
        snapshot = skeleton.take(result, {id(vae): 0, id(config): 1}, [vae, config])
        assert snapshot.nbytes < 20_000
        other_vae, other_config = nn.Linear(1, 1), {"b": 2}
        again = skeleton.restore(segment_of(snapshot), [other_vae, other_config])
        assert again["vae"] is other_vae and again["list"][0] is other_vae and again["list"][1] is other_config

    def test_a_tensor_may_be_one(self) -> None:
        weight = nn.Parameter(torch.ones(1000))
        snapshot = skeleton.take([weight, weight.data], {id(weight): 0}, [weight])
        own, data = skeleton.restore(segment_of(snapshot), [weight])
        assert own is weight and torch.equal(data, weight.data)


class TestAmbientModes:
    def values(self) -> list[Any]:
        return [torch.ones(2), nn.Linear(2, 2), torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]

    def check(self, segment: _core.Segment) -> None:
        assert [facts(v) for v in _tensors(skeleton.restore(segment, []))] == self.expected

    @pytest.fixture
    def segment(self) -> _core.Segment:
        values = self.values()
        self.expected = [facts(v) for v in _tensors(values)]
        return segment_of(skeleton.take(values, {}, []))

    def test_inference_mode(self, segment: _core.Segment) -> None:
        with torch.inference_mode():
            self.check(segment)
            assert torch.is_inference_mode_enabled()

    def test_no_grad_and_device(self, segment: _core.Segment) -> None:
        with torch.no_grad(), torch.device("meta"):
            self.check(segment)
            assert torch.empty(1).device.type == "meta"

    def test_dispatch_mode(self, segment: _core.Segment) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Refusing(TorchDispatchMode):
            def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
                raise AssertionError("the caller's mode was asked")

        with Refusing():
            restored = skeleton.restore(segment, [])
        assert [facts(v) for v in _tensors(restored)] == self.expected


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [t for v in values for t in (v.parameters() if isinstance(v, nn.Module) else [v])]


class TestLifetimes:
    def test_one_tensor_keeps_the_mapping_and_the_last_one_frees_it(self) -> None:
        before = _mappings()
        segment = segment_of(skeleton.take([_not_resizable(), _not_resizable()], {}, []))
        values = skeleton.restore(segment, [])
        last = values[0][1:]
        del values, segment
        gc.collect()
        assert _mappings() == before + 1 and bytes(last.tolist()) == b"bcdefgh"
        del last
        gc.collect()
        assert _mappings() == before

    def test_freed_on_another_thread(self) -> None:
        before = _mappings()
        box = [copy_of(_not_resizable())]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        gc.collect()
        assert _mappings() == before

    def test_resizing_leaves_the_mapping(self) -> None:
        value = copy_of(torch.arange(4.0))
        value.resize_(1000)
        assert value[:4].tolist() == [0, 1, 2, 3]

    def test_buffers_are_aligned(self) -> None:
        assert all(t.data_ptr() % 64 == 0 for t in copy_of([torch.ones(i) for i in range(1, 20)]))

    def test_at_interpreter_exit(self) -> None:
        code = (
            "import torch; from overmind import _core, skeleton\n"
            "s = skeleton.take(torch.ones(3), {}, [])\n"
            "kept = skeleton.restore(_core.make_segment(loader='l', target='t', meta=b'', skeleton=s.skeleton, "
            "tensors=s.tensors, buffers=s.buffers), [])\n"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def _not_resizable() -> torch.Tensor:
    return torch.frombuffer(bytearray(b"abcdefgh"), dtype=torch.uint8)


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


@pytest.mark.parametrize("cut", [0, 10, 33, 60])
def test_cut_records_are_an_error(cut: int) -> None:
    snapshot = skeleton.take([torch.ones(3), nn.Parameter(torch.ones(3))], {}, [])
    snapshot.tensors = snapshot.tensors[:cut]
    with pytest.raises(ValueError, match="malformed"):
        skeleton.restore(segment_of(snapshot), [])


def test_records_that_lie_are_an_error() -> None:
    snapshot = skeleton.take(torch.ones(3), {}, [])
    for at in range(32, len(snapshot.tensors)):
        lying = bytearray(snapshot.tensors)
        lying[at] ^= 0xFF
        snapshot_of_lies = skeleton.Snapshot(
            snapshot.skeleton, bytes(lying), snapshot.buffers, [], snapshot.names, snapshot.used, snapshot.nbytes
        )
        try:
            value = skeleton.restore(segment_of(snapshot_of_lies), [])
        except ValueError:
            continue
        assert not isinstance(value, torch.Tensor) or value.numel() == 0 or value.untyped_storage().nbytes() == 12


def test_names_of_the_globals() -> None:
    assert skeleton.take([nn.ReLU(), collections.OrderedDict()], {}, []).names == {
        ("torch.nn.modules.activation", "ReLU"),
        ("overmind._core", "new_module"),
        ("collections", "OrderedDict"),
    }


def test_another_torch_is_one_warning_and_no_failure(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if backend == "fallback":
        pytest.skip("the choice itself is tested once")
    said: list[str] = []
    monkeypatch.setattr(log, "warn_once", said.append)
    monkeypatch.setattr(_torch, "TORCH_VERSION", "1.0")
    assert torch.equal(copy_of(torch.arange(3)), torch.arange(3))
    assert "1.0" in said[0] and "--no-build-isolation --force-reinstall overmind-jupyter" in said[0]


def test_without_torch_nothing_imports_it() -> None:
    code = (
        "import sys; from overmind import _core, skeleton\n"
        "arguments = {'x': 1}\n"
        "s = skeleton.take([arguments, 'text'], {id(arguments): 0}, [arguments])\n"
        "segment = _core.make_segment(loader='l', target='t', meta=b'', skeleton=s.skeleton, tensors=s.tensors, "
        "buffers=s.buffers)\n"
        "assert skeleton.restore(segment, [{'y': 2}]) == [{'y': 2}, 'text']\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_random_state_is_untouched() -> None:
    state = torch.get_rng_state()
    copy_of([torch.ones(3), torch.Generator().manual_seed(1)])
    assert torch.equal(state, torch.get_rng_state())


def test_a_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    again = copy_of(generator)
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))


def test_plain_pickle_agrees() -> None:
    value = {"a": [1, 2.5, "x", None, b"y", {1, 2}, (3,)], "t": torch.ones(2)}
    again = copy_of(value)
    plain = pickle.loads(pickle.dumps(value))
    assert again["a"] == plain["a"] and torch.equal(again["t"], plain["t"])
