# SPDX-License-Identifier: MIT
"""The caller's objects are found in one call and, by the same paths, in another with an equal key."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from overmind import key
from overmind.encoding import Uncacheable
from overmind.loader import Loader
from overmind.substitution import shares
from transformers import BertConfig, BertForMaskedLM

PIPELINE = Loader(name="pipeline", embeds_modules=True)


@dataclass
class Options:
    names: list[str] = field(default_factory=list)


@pytest.fixture(autouse=True)
def old_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file may be newer than the process that tests it, right after it was edited."""
    monkeypatch.setattr("overmind.modules.PROCESS_START_NS", 1 << 62)


def load(path: str, *parts: Any, **kwargs: Any) -> None:
    """Stands for a loader; only its signature is used."""


def request(*args: Any, **kwargs: Any) -> key.Request:
    return key.make_request(PIPELINE, load, ("p", *args), kwargs, None)


def bert() -> BertForMaskedLM:
    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=16,
        max_position_embeddings=8,
    )  # fmt: skip
    return BertForMaskedLM(config)


def call() -> dict[str, Any]:
    return {
        "model": bert(),
        "scheduler": DDIMScheduler(),
        "nested": {"list": [[1], {"deep": [2]}], 3: ([4], {5})},
        "ordered": OrderedDict(a=[1]),
        "default": defaultdict(list, a=[1]),
        "options": Options(["x"]),
        "function": partial(int, base=2),
        "tensor": torch.arange(3),
        "array": np.arange(3),
        "bytes": bytearray(b"1"),
    }


def through_json(paths: list[Any]) -> list[Any]:
    return json.loads(json.dumps(paths))  # type: ignore[no-any-return]


def test_every_mutable_object_is_found_in_its_own_call() -> None:
    kwargs = call()
    arguments = request([1], **kwargs).arguments
    numbers, objects = arguments.substitutes()
    for wanted in (
        *kwargs.values(), kwargs["nested"]["list"][1]["deep"], kwargs["nested"][3][0], kwargs["nested"][3][1],
        kwargs["options"].names, kwargs["model"].config, kwargs["model"].bert.embeddings, kwargs["scheduler"].betas,
        kwargs["model"].cls.predictions.decoder.weight, kwargs["model"].bert.embeddings.position_ids,
    ):  # fmt: skip
        assert objects[numbers[id(wanted)]] is wanted
    resolved = arguments.resolve(through_json(arguments.paths()))
    assert len(resolved) == len(objects)
    assert all(one is other for one, other in zip(resolved, objects, strict=True))


def test_the_same_paths_lead_to_the_objects_of_another_call() -> None:
    one, other = call(), call()
    recorded, now = request([1], **one), request([1], **other)
    assert recorded.key == now.key
    numbers, objects = recorded.arguments.substitutes()
    resolved = now.arguments.resolve(through_json(recorded.arguments.paths()))
    own_numbers, own_objects = now.arguments.substitutes()
    assert len(resolved) == len(objects)
    assert all(mine is found for mine, found in zip(own_objects, resolved, strict=True))
    weight = "bert.embeddings.word_embeddings.weight"
    number = numbers[id(one["model"].get_parameter(weight))]
    assert resolved[number] is other["model"].get_parameter(weight)
    assert own_numbers[id(resolved[number])] == number


def test_modules_in_lists_and_dicts_are_found() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    arguments = request(controlnet=[one, {"x": other}]).arguments
    numbers, objects = arguments.substitutes()
    assert {id(one), id(other), id(one.weight), id(other.bias)} <= set(numbers)
    assert all(found is wanted for found, wanted in zip(arguments.resolve(arguments.paths()), objects, strict=True))


def test_aliases_of_arguments_give_other_keys() -> None:
    vae = torch.nn.Linear(2, 2)
    assert request(a=vae, b=vae).key != request(a=vae, b=torch.nn.Linear(2, 2)).key
    assert request(modules=[vae, vae]).key != request(modules=[vae, torch.nn.Linear(2, 2)]).key


def test_a_changed_structure_is_a_miss() -> None:
    """The key does not look inside a module; the places in it are compared when they are needed."""
    one, other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    paths = request(vae=one).arguments.paths()
    other.append(torch.nn.ReLU())
    assert request(vae=one).key == request(vae=other).key
    with pytest.raises(LookupError):
        request(vae=other).arguments.resolve(paths)
    relu, tanh = torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Sequential(torch.nn.Tanh())  # as many parts
    with pytest.raises(LookupError):
        request(vae=tanh).arguments.resolve(request(vae=relu).arguments.paths())
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2))
    tied[0].register_parameter("again", tied[0].weight)
    untied = torch.nn.Sequential(torch.nn.Linear(2, 2))
    untied[0].register_parameter("again", torch.nn.Parameter(torch.zeros(2, 2)))
    with pytest.raises(LookupError):
        request(vae=untied).arguments.resolve(request(vae=tied).arguments.paths())


def test_one_argument_inside_another_can_not_be_told_apart() -> None:
    outer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for kwargs in ({"a": outer, "b": outer[0]}, {"a": torch.nn.Sequential(outer[0]), "b": outer}):
        with pytest.raises(Uncacheable, match="part"):
            request(**kwargs).arguments.substitutes()


def test_a_path_that_leads_nowhere_is_a_lookup_error() -> None:
    arguments = request(a=[1]).arguments
    for path in (["a", "b"], ["a", "a", "i", 5], ["a", "a", "?", 1], ["tree", 1, "", ["a", "a"]]):
        with pytest.raises(LookupError):
            arguments.resolve([path])


def test_memory_of_the_arguments_is_known() -> None:
    tensor, array, vae = torch.arange(8), np.arange(8), torch.nn.Linear(2, 2)
    objects = request(tensor=tensor, array=array, vae=vae).arguments.substitutes()[1]
    assert shares(objects, [(tensor[4:].data_ptr(), 8)])
    assert shares(objects, [(array[4:].ctypes.data, 8)])
    assert shares(objects, [(vae.weight.data_ptr(), 4)])
    assert not shares(objects, [(torch.arange(8).data_ptr(), 64), (tensor.data_ptr() + tensor.nbytes, 8), (0, 0)])
