# SPDX-License-Identifier: MIT
"""Which calls share a key, and which never may. The values are what transformers 5.24 and torch 2.13 do natively."""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import math
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overmind import key
from overmind.encoding import Encoder, Uncacheable
from overmind.loader import Loader
from transformers import AutoModel, BertConfig, BertForMaskedLM

GENERIC = Loader(name="overmind.load")
MODEL = Loader(
    name="transformers.PreTrainedModel.from_pretrained",
    target="pretrained_model_name_or_path",
    hub=True,
    libraries=("transformers", "torch"),
)
TORCH = Loader(name="torch.load", target="f", libraries=("torch",))
PIPELINE = Loader(name="pipeline", embeds_modules=True)

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Options:
    depth: int = 1
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Slotted:
    width: int = 3


class Plain:
    """An object of a class that Overmind knows nothing of: none of its code may run."""

    def __eq__(self, _other: object) -> bool:
        raise AssertionError("user code ran")

    def __hash__(self) -> int:
        raise AssertionError("user code ran")

    def __repr__(self) -> str:
        raise AssertionError("user code ran")

    def __reduce__(self) -> Any:
        raise AssertionError("user code ran")


def importable(value: Any) -> Any:
    """Makes a name of this file importable: pytest loads test files under a name that may not be in sys.modules."""
    sys.modules.setdefault(value.__module__, sys.modules[__name__])
    return value


def encode(value: Any) -> bytes:
    encoder = Encoder()
    encoder.argument("x", value)
    return b"".join(encoder.parts)


def load(path: Any, *rest: Any, a: int = 1, b: int = 2, **kwargs: Any) -> None:
    """Stands for a loader; only its signature is used."""


@pytest.fixture(autouse=True)
def old_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file may be newer than the process that tests it, right after it was edited."""
    monkeypatch.setattr("overmind.modules.PROCESS_START_NS", 1 << 62)


def request_of(*args: Any, **kwargs: Any) -> key.Request:
    return key.make_request(GENERIC, load, args, kwargs, None)


def key_of(*args: Any, **kwargs: Any) -> bytes:
    return request_of(*args, **kwargs).key


def model_key(*args: Any, **kwargs: Any) -> bytes:
    return key.make_request(MODEL, BertForMaskedLM.from_pretrained, args, kwargs, BertForMaskedLM).key


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 10**30, 1.0, 0.0, -0.0, math.inf, 1j, "1", "", "True", "None", b"1", b"",
    bytearray(b"1"),
    [], [1], [[1]], [1, 2], [2, 1], (), (1,), ((1,),), {}, {1: 2}, {2: 1}, {"1": 2}, {1: 2, 3: 4}, {3: 4, 1: 2},
    OrderedDict({1: 2}), set(), {1}, {"1"}, frozenset({1}), range(1), range(2), slice(1), slice(1, None), ...,
    "torch.float32", torch.float32, torch.float16, torch.device("cpu"), torch.strided, torch.contiguous_format,
    torch.Size([1]), int, bool, "builtins.int", len, os.path.join,
    functools.partial(int, base=2), functools.partial(int),
    Colour.RED, Colour.BLUE, Level.LOW, Point(1, 2), Point(2, 1), Options(), Options(2), Options(1, ["x"]), Slotted(),
    pathlib.PureWindowsPath("a"), "a", Path("a"), [None, [None]], [[None], None], [None, None],
    ["ab", "c"], ["a", "bc"],
    torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1), torch.ones(2),
    torch.nn.Parameter(torch.zeros(2)),
]  # fmt: skip


def test_no_two_values_are_taken_for_each_other() -> None:
    importable(Colour)
    encoded = [encode(value) for value in VALUES]
    for index, data in enumerate(encoded):
        same = [VALUES[other] for other in range(index) if encoded[other] == data]
        assert not same, f"{VALUES[index]!r} is taken for {same!r}"


def test_numpy_values_differ_by_type_and_content() -> None:
    import numpy as np

    values = [
        np.float32(1), np.float64(1), np.int64(1), 1, np.dtype("f4"), np.dtype(">f4"), np.zeros(2), np.zeros(2, "f4"),
        np.ones(2), np.zeros((2, 1)), np.asfortranarray(np.arange(4).reshape(2, 2)), np.arange(4).reshape(2, 2),
    ]  # fmt: skip
    assert len({encode(value) for value in values}) == len(values)
    with pytest.raises(Uncacheable, match="objects"):
        encode(np.array([object()]))


def test_nan_is_itself() -> None:
    assert encode(math.nan) == encode(float("nan"))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda parts: st.lists(parts) | st.tuples(parts, parts) | st.dictionaries(st.text(), parts),
    max_leaves=8,
)


def shape(value: Any) -> Any:
    """A value that is equal exactly for values that a loader can't tell apart, aliases left out."""
    if isinstance(value, dict):
        return ("dict", [(shape(name), shape(part)) for name, part in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [shape(part) for part in value])
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@settings(max_examples=300, deadline=None)
@given(plain, plain)
def test_equal_bytes_mean_equal_values(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (shape(one) == shape(other))


def test_order_of_keywords_is_no_input_and_order_of_a_dict_is() -> None:
    assert key_of("p", a=1, b=2, z=3, y=4) == key_of("p", b=2, z=3, a=1, y=4)
    assert key_of("p", z={"a": 1, "b": 2}) != key_of("p", z={"b": 2, "a": 1})


def test_a_default_that_is_given_is_the_default() -> None:
    assert key_of("p") == key_of("p", a=1) == key_of(path="p", b=2)
    assert key_of("p") != key_of("p", a=True)
    assert key_of("p") != key_of("p", a=1.0)
    assert key_of("p", 7) != key_of("p")


def test_aliases_are_part_of_the_key() -> None:
    one: list[int] = [1]
    assert key_of("p", u=one, v=one) != key_of("p", u=[1], v=[1])
    assert key_of("p", u=[1], v=[1]) == key_of("p", u=[1], v=[1])


def test_a_cycle_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [1]
    other.append(other)
    assert encode(loop) == encode(other)
    assert encode(loop) != encode([1, loop])


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: io.BytesIO(b"x"), "stream"),
    (lambda: open(os.devnull), "open file"),  # noqa: SIM115
    (lambda: lambda: 1, "importable|imported"),
    (Plain, "Plain"),
    (threading.Lock, "lock"),
    (torch.Generator, "Generator"),
    (lambda: torch.nn.Linear(2, 2), "weights"),
    (lambda: torch.zeros(1 << 20), "too big"),
    (lambda: torch.zeros(4, 4).t()[1:], "contiguous"),
    (lambda: torch.zeros(2, requires_grad=True) * 2, "gradient"),
    (lambda: (x for x in ()), "generator"),
    (lambda: [Plain()], "Plain"),
    (lambda: {Plain: Plain()}, "Plain"),
    (lambda: functools.reduce(lambda inner, _: [inner], range(500), []), "deeply"),
    (lambda: list(range(200_000)), "too many"),
    (lambda: [].append, "can't be imported|state"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_what_can_not_be_compared_is_refused_with_a_reason(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(Uncacheable, match=reason) as raised:
        request_of("p", thing=make())
    assert "'thing'" in str(raised.value)


def test_a_class_of_the_notebook_is_refused() -> None:
    cell = type("Net", (), {"__module__": "__main__"})
    with pytest.raises(Uncacheable, match="Net"):
        request_of("p", thing=cell)
    changed = type("BertConfig", (), {"__module__": "transformers"})  # its name leads to another class
    with pytest.raises(Uncacheable, match="BertConfig"):
        request_of("p", thing=changed)


def test_wrong_arguments_are_left_to_the_native_call() -> None:
    for args, kwargs in [((), {}), (("p",), {"path": "q"})]:
        with pytest.raises(Uncacheable):
            key.make_request(GENERIC, load, args, kwargs, None)
    with pytest.raises(Uncacheable):
        key.make_request(GENERIC, lambda path: None, ("p",), {}, None)


def test_configs_are_compared_by_their_whole_content(tmp_path: Path) -> None:
    folder = str(tmp_path)
    same = model_key(folder, config=BertConfig(hidden_size=16))
    assert same == model_key(folder, config=BertConfig(hidden_size=16))
    assert same != model_key(folder, config=BertConfig(hidden_size=32))
    marked = BertConfig(hidden_size=16)
    marked.my_own = 1  # to_dict() has it; an attribute of a class that to_dict() skips is seen as well
    assert same != model_key(folder, config=marked)
    hidden = BertConfig(hidden_size=16)
    hidden._attn_implementation = "eager"
    assert same != model_key(folder, config=hidden)


def test_k08_spellings_of_a_dtype_never_share_a_wrong_key(tmp_path: Path) -> None:
    keys = {
        model_key(str(tmp_path), **given)
        for given in ({"dtype": "float16"}, {"dtype": torch.float32}, {"dtype": "auto"}, {"torch_dtype": torch.float32})
    }
    assert len(keys) == 4


# Measured: model.name_or_path, config._name_or_path and a tokenizer's vocab_file keep the spelling of a str; a Path
# gives what its os.fspath() gives.
def test_k02_a_path_is_its_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_key(Path("m")) == model_key("m")
    assert model_key(Path("./m")) == model_key("m")  # Path("./m") is Path("m")
    spellings = ["m", "./m", "m/", str(tmp_path / "m"), "../" + tmp_path.name + "/m"]
    assert len({model_key(spelling) for spelling in spellings}) == len(spellings)


def test_k02_the_working_directory_decides_what_a_relative_path_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "AB":
        (tmp_path / name / "m").mkdir(parents=True)
    keys = []
    for name in "ABA":
        monkeypatch.chdir(tmp_path / name)
        keys.append((model_key("./m"), key_of("./m"), key_of("nothing of that name")))
    assert keys[0] == keys[2]
    assert all(one != other for one, other in zip(keys[0], keys[1], strict=True))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("A")
    through_a = model_key("link/m")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("B")
    assert model_key("link/m") != through_a


def test_k02_a_tilde_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Uncacheable, match="neither a file"):
        model_key("~/m")


def test_a_missing_target_is_left_to_the_native_call() -> None:
    with pytest.raises(Uncacheable, match="does not exist"):
        key.make_request(TORCH, torch.load, ("/nope",), {}, None)


def test_the_class_that_is_asked_is_part_of_the_key(tmp_path: Path) -> None:
    folder = str(tmp_path)
    auto = key.make_request(MODEL, AutoModel.from_pretrained, (folder,), {}, AutoModel).key
    assert auto != model_key(folder)


def test_a_replaced_loader_is_not_cached(tmp_path: Path) -> None:
    with pytest.raises(Uncacheable, match="replaced"):
        key.make_request(MODEL, load, (str(tmp_path),), {}, None)


def test_a_reason_of_the_loader_is_given(tmp_path: Path) -> None:
    refusing = dataclasses.replace(MODEL, refuse=lambda call: f"no {call.arguments['config']}")
    with pytest.raises(Uncacheable, match="no mine"):
        key.make_request(
            refusing, BertForMaskedLM.from_pretrained, (str(tmp_path),), {"config": "mine"}, BertForMaskedLM
        )


def test_hidden_inputs_of_a_loader_are_part_of_the_key(tmp_path: Path) -> None:
    keys = set()
    for value in (None, [1], [2]):
        loader = dataclasses.replace(TORCH, ambient=lambda _call, value=value: value)
        keys.add(key.make_request(loader, torch.load, (str(tmp_path),), {}, None).key)
    assert len(keys) == 3


def test_k06_arguments_stay_as_they_are(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16)
    before = dict(vars(config))
    mapping = {"a": "b"}
    kwargs: dict[str, Any] = {"config": config, "key_mapping": mapping, "output_attentions": True}
    key.make_request(MODEL, BertForMaskedLM.from_pretrained, (Path(tmp_path),), kwargs, BertForMaskedLM)
    assert vars(config) == before
    assert kwargs["key_mapping"] is mapping
    assert list(kwargs) == ["config", "key_mapping", "output_attentions"]


def test_embedded_modules_are_known_by_facts_and_not_by_weights() -> None:
    def of(module: torch.nn.Module) -> bytes:
        return key.make_request(PIPELINE, load, ("p",), {"vae": module}, None).key

    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert of(one) == of(other)
    assert of(one) != of(other.half())
    assert of(one) != of(torch.nn.Linear(2, 2).eval())
    assert of(one) != of(torch.nn.Linear(3, 2))  # in_features
    hooked = torch.nn.Linear(2, 2)
    hooked.register_forward_hook(print)
    assert of(one) != of(hooked)


SAME_ELSEWHERE = """
    import sys
    from overmind import key
    from overmind.loader import Loader
    loader = Loader("json.load", target="fp", libraries=("json", "torch", "transformers", "numpy"))
    if {first}:
        import torch, transformers
    import json
    print(key.make_request(loader, json.load, ({path!r},), {{}}, None).key.hex())
"""


def test_the_key_is_the_same_in_another_process_whether_libraries_are_imported_or_not(tmp_path: Path) -> None:
    keys = set()
    for first in (True, False):
        source = textwrap.dedent(SAME_ELSEWHERE).format(first=first, path=str(tmp_path))
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(int(first)),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True
        )
        keys.add(done.stdout)
    assert len(keys) == 1


def front(*model_args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return model_args, kwargs


def test_a_target_at_the_front_of_the_positionals_is_the_target(tmp_path: Path) -> None:
    """AutoModel.from_pretrained(*model_args, **kwargs) takes its target from there."""
    loader = Loader("t.front", target="path", libraries=(front.__module__.partition(".")[0],))
    by_position = key.make_request(loader, front, (str(tmp_path), 5), {}, None)
    assert by_position.target == str(tmp_path)
    assert by_position.call.arguments == {"path": str(tmp_path), "model_args": (5,)}
    one = key.make_request(loader, front, (str(tmp_path),), {}, None)
    other = key.make_request(loader, front, (), {"path": str(tmp_path)}, None)
    assert one.target == other.target == str(tmp_path)


def nothing_given() -> int:
    return 5


def test_a_function_without_arguments_has_a_key() -> None:
    request = key.make_request(Loader("t.nothing"), nothing_given, (), {}, None)
    assert request.encoded._pieces() == {}


def test_the_order_of_a_users_keywords_is_an_input() -> None:
    loader = Loader("t.front")
    one = key.make_request(loader, front, (), {"x": 1, "y": 2}, None)
    other = key.make_request(loader, front, (), {"y": 2, "x": 1}, None)
    assert one.key != other.key
