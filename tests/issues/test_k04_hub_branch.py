# SPDX-License-Identifier: MIT
"""K04: the branch of a hub repo moved, and the cache went on answering with the old commit.

A load by repo id says "main", and what "main" is is decided by the hub cache of the client, at the time of the load. A
key that holds the word instead of the commit never sees a new commit; one that looks only at the weights misses a
commit that changed a config and left the weights alone.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle

OLD, NEW = "1" * 40, "2" * 40

LOAD = """
from transformers import BertLMHeadModel
m = BertLMHeadModel.from_pretrained("o/n", cache_dir={cache!r}{more})
value = [m.generation_config.max_length, float(m.bert.embeddings.LayerNorm.weight.sum())]
"""


def repo(oracle: Oracle, folder: Path) -> str:
    """A hub cache with two commits of o/n: equal weights, another generation_config.json. main is the first."""
    cache = str(folder / "hub")
    oracle.nat(f"""
        import json, tiny
        from transformers import BertLMHeadModel
        from pathlib import Path
        source = Path({str(folder)!r}) / "source"
        tiny.bert(str(source), fill=1.0, cls=BertLMHeadModel, is_decoder=True)
        for commit, length in (({OLD!r}, 11), ({NEW!r}, 22)):
            (source / "generation_config.json").write_text(json.dumps({{"max_length": length}}))
            tiny.hub({cache!r}, "o/n", commit, str(source))
    """)
    point(folder, OLD)
    return cache


def point(folder: Path, commit: str) -> None:
    (folder / "hub" / "models--o--n" / "refs" / "main").write_text(commit)


def test_a_moved_branch_is_seen_at_the_next_load(oracle: Oracle, folder: Path) -> None:
    source = LOAD.format(cache=repo(oracle, folder), more="")
    assert oracle.hit(source).value == [11, 16.0]
    point(folder, NEW)
    moved = oracle.run(source)
    assert moved.value == [22, 16.0]
    assert moved.outcomes != ["hit"]
    assert oracle.hit(source).value == [22, 16.0]
    point(folder, OLD)
    assert oracle.hit(source).value == [11, 16.0]


def test_a_commit_asked_for_by_name_stays_what_it_is(oracle: Oracle, folder: Path) -> None:
    cache = repo(oracle, folder)
    old = LOAD.format(cache=cache, more=f", revision={OLD!r}")
    new = LOAD.format(cache=cache, more=f", revision={NEW!r}")
    for commit in (OLD, NEW, OLD):
        point(folder, commit)
        assert oracle.hit(old).value == [11, 16.0]
        assert oracle.hit(new).value == [22, 16.0]


def test_local_files_only_resolves_now_as_well(oracle: Oracle, folder: Path) -> None:
    source = LOAD.format(cache=repo(oracle, folder), more=", local_files_only=True")
    assert oracle.hit(source).value == [11, 16.0]
    point(folder, NEW)
    assert oracle.run(source).value == [22, 16.0]
    assert oracle.hit(source).value == [22, 16.0]


def test_a_branch_that_is_gone_is_the_native_error(oracle: Oracle, folder: Path) -> None:
    source = LOAD.format(cache=repo(oracle, folder), more="")
    assert oracle.hit(source).value == [11, 16.0]
    (folder / "hub" / "models--o--n" / "refs" / "main").unlink()
    run = oracle.by(f"""
        from transformers import BertLMHeadModel
        try:
            BertLMHeadModel.from_pretrained("o/n", cache_dir={str(folder / "hub")!r})
            value = "loaded"
        except OSError as error:
            value = type(error).__name__
    """)
    assert run.value == "OSError"
