# SPDX-License-Identifier: MIT
"""M06: the same object handed out twice.

A cache inside the process that returns what it returned before gives two callers one object: a config set through one
is set in the other, and in the cached copy, for every later load. Two loads are two objects, always: on hits, with the
daemon gone half-way, with no daemon to be had, with the cache switched off.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle

SOURCE = """
import os, tiny
from diffusers import DDIMScheduler
from transformers import AutoTokenizer, BertConfig, BertLMHeadModel
root = {root!r}
if not os.path.exists(root + "/m"):
    tiny.bert(root + "/m", cls=BertLMHeadModel, is_decoder=True)
    tiny.tokenizer(root + "/t")
    DDIMScheduler().save_pretrained(root + "/s")
def load():
    return (BertLMHeadModel.from_pretrained(root + "/m"), AutoTokenizer.from_pretrained(root + "/t"),
            DDIMScheduler.from_pretrained(root + "/s"), BertConfig.from_pretrained(root + "/m"))
def seen(m, t, s, c):
    return [getattr(m.config, "x", None), m.generation_config.max_length, t.padding_side, len(t),
            s.config.num_train_timesteps, float(s.betas[0]),
            getattr(c, "x", None), float(m.bert.embeddings.LayerNorm.weight[0])]
def spoil(m, t, s, c):
    m.config.x = c.x = 1
    m.generation_config.max_length = 5
    t.padding_side = "left"
    t.add_tokens(["new"])
    s.register_to_config(num_train_timesteps=7)
    s.betas[0] = 9
    m.bert.embeddings.LayerNorm.weight.data[0] = 9
a = load()
{between}
b = load()
value = [seen(*a), seen(*b), all(x is not y for x, y in zip(a, b))]
spoil(*a)
value += [seen(*a), seen(*b), seen(*load())]
"""


def check(value: list[object], untouched: list[object] | None = None) -> None:
    first, second, distinct, spoilt, beside, later = value
    assert distinct is True
    assert first == second == beside == later
    assert first[:5] == [None, first[1], "right", 8, 1000] and first[6:] == [None, 1.0]
    assert spoilt == [1, 5, "left", 9, 7, 9.0, 1, 9.0]


def test_two_loads_are_two_objects(oracle: Oracle, folder: Path) -> None:
    check(oracle.hit(SOURCE.format(root=str(folder), between="")).value)


def test_with_the_daemon_stopped_between(oracle: Oracle, folder: Path) -> None:
    between = "import overmind\nif overmind.history():\n    from overmind import store\n    store.client().stop()\n"
    source = SOURCE.format(root=str(folder), between=between)
    native = oracle.nat(source)
    for _ in range(2):
        run = oracle.run(source)
        assert run.value == native.value
        check(run.value)


@pytest.mark.parametrize("switch", ["disabled", "unusable"])
def test_with_no_daemon_at_all(oracle: Oracle, folder: Path, runtime: Path, switch: str) -> None:
    (folder / "file").write_text("no folder can be made below a file")
    environment = {
        "disabled": {"OVERMIND_DISABLE": "1"},
        "unusable": {"OVERMIND_RUNTIME_DIR": str(folder / "file" / "x")},
    }
    source = SOURCE.format(root=str(folder), between="")
    native = oracle.nat(source)
    oracle.hit(source)
    run = oracle.run(source, env=environment[switch])
    assert run.value == native.value
    assert "hit" not in run.outcomes
    check(run.value)
