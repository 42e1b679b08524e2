# SPDX-License-Identifier: MIT
"""K06: arguments that can't be hashed, can't be pickled, or come back changed.

A cache that hashes or pickles the arguments raises on a lambda, a lock or a set; one that normalises them in place
hands the caller's own dict and config back altered; one that hashes by `repr` takes two different objects for one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from processes import write_module

MYLIB = """
import collections
Point = collections.namedtuple("Point", "x y")
class Slots:
    __slots__ = ("a", "never_set")
    def __init__(self): self.a = 1
def load(path, **kwargs):
    with open(path) as file:
        return [file.read(), sorted(kwargs)]
"""


def test_map_location_as_a_function(oracle: Oracle, folder: Path) -> None:
    run = oracle.by(f"""
        import torch
        path = {str(folder / "w.pt")!r}
        import os
        if not os.path.exists(path):
            torch.save(torch.arange(3.), path)
        seen = []
        def place(storage, location):
            seen.append(location)
            return storage
        value = [torch.load(path, map_location=lambda s, l: s).tolist(), torch.load(path, map_location=place).tolist(),
                 torch.load(path, map_location={{"cuda:0": "cpu"}}).tolist(), seen]
    """)
    assert run.value == [[0.0, 1.0, 2.0]] * 3 + [["cpu"]]


def test_a_config_and_a_mapping_are_the_callers_own_afterwards(oracle: Oracle, folder: Path) -> None:
    oracle.nat(f"import tiny; tiny.bert({str(folder / 'm')!r}, fill=1.0)")
    run = oracle.by(f"""
        from transformers import BertConfig, BertForMaskedLM
        path = {str(folder / "m")!r}
        config = BertConfig.from_pretrained(path)
        config.extra = [1, 2]
        mapping = {{"^nothing": "something"}}
        before = [config.to_json_string(), dict(mapping), sorted(vars(config))]
        m = BertForMaskedLM.from_pretrained(path, config=config, key_mapping=mapping)
        after = [config.to_json_string(), dict(mapping), sorted(vars(config))]
        value = [before[1:] == after[1:], before, after, m.config is config, m.config.extra,
                 float(m.bert.embeddings.LayerNorm.weight.sum())]
        config.extra.append(3)
        value.append(m.config.extra)
    """)
    same, before, after, is_the_callers, extra, total, extra_later = run.value
    assert same and before[1:] == after[1:]
    assert extra == [1, 2] and total == 16.0
    assert extra_later == ([1, 2, 3] if is_the_callers else [1, 2])


@pytest.mark.parametrize(
    "argument",
    [
        "{1, 2, 3}",
        "frozenset('ab')",
        "mylib.Point(1, 2)",
        "mylib.Slots()",
        "torch.Generator().manual_seed(3)",
        "torch.nn.Linear(2, 2)",
        "threading.Lock()",
        "lambda: 1",
        "open(os.devnull)",
        "(item for item in 'ab')",
        "[[]] * 2",
        "recursive",
        "float('nan')",
        "object()",
        "torch.arange(3)",
        "numpy.arange(3)",
    ],
)
def test_arguments_of_every_kind_load(oracle: Oracle, folder: Path, argument: str) -> None:
    write_module(folder / "mylib.py", MYLIB)
    (folder / "data").write_text("content")
    run = oracle.by(f"""
        import os, sys, threading, numpy, torch, overmind
        sys.path.insert(0, {str(folder)!r})
        import mylib
        recursive = []
        recursive.append(recursive)
        argument = {argument}
        kwargs = {{"given": argument, "inside": {{"deep": [argument]}}}}
        result = overmind.load(mylib.load, {str(folder / "data")!r}, **kwargs)
        value = [result, list(kwargs), kwargs["given"] is argument, kwargs["inside"]["deep"][0] is argument]
        if hasattr(argument, "__next__"):
            value.append(list(argument) if not hasattr(argument, "name") else argument.tell())
    """)
    assert run.value[:4] == [["content", ["given", "inside"]], ["given", "inside"], True, True]


def test_a_generator_argument_keeps_its_state(oracle: Oracle, folder: Path) -> None:
    write_module(
        folder / "mylib.py",
        "import torch\ndef load(path, g):\n    return [open(path).read(), torch.rand(2, generator=g).tolist()]\n",
    )
    (folder / "data").write_text("content")
    run = oracle.by(f"""
        import sys, torch, overmind
        sys.path.insert(0, {str(folder)!r})
        import mylib
        g = torch.Generator().manual_seed(3)
        value = [overmind.load(mylib.load, {str(folder / "data")!r}, g) for _ in range(2)]
        value.append(torch.rand(1, generator=g).tolist())
    """)
    first, second, _third = run.value
    assert first[0] == "content" and first[1] != second[1], "the second load must draw the next numbers"


def test_two_unequal_sets_are_two_arguments(oracle: Oracle, folder: Path) -> None:
    write_module(folder / "mylib.py", "def load(path, names):\n    return [open(path).read(), sorted(names)]\n")
    (folder / "data").write_text("content")
    run = oracle.by(f"""
        import sys, overmind
        sys.path.insert(0, {str(folder)!r})
        import mylib
        sets = {{"a"}}, {{"b"}}, {{"a", "b"}}
        value = [overmind.load(mylib.load, {str(folder / "data")!r}, names) for names in sets]
    """)
    assert run.value == [["content", ["a"]], ["content", ["b"]], ["content", ["a", "b"]]]
