# SPDX-License-Identifier: MIT
"""A restored fast tokenizer is the native one, whenever it is looked at."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from describe import describe
from overmind import skeleton
from overmind.quirks import tokenizers as quirk
from segments import copy_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPTokenizer, PreTrainedTokenizerFast


def fast() -> Any:
    vocab = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", additional_special_tokens=["<x>"])


def clip(tmp_path: Path) -> Any:
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a": 2, "b": 3, "a</w>": 4, "b</w>": 5, "ab</w>": 6}
    return CLIPTokenizer(vocab=vocab, merges=[("a", "b</w>")])


def test_the_rust_part_is_built_at_first_use() -> None:
    restored = copy_of(fast())
    assert quirk.unbuilt(vars(restored))
    assert restored("ab a <x>").input_ids == fast()("ab a <x>").input_ids
    assert not quirk.unbuilt(vars(restored))
    assert type(restored._tokenizer) is Tokenizer
    assert restored._tokenizer is restored.backend_tokenizer is vars(restored)["_tokenizer"]


def test_unused_it_has_the_attributes_of_the_native_one() -> None:
    restored = copy_of(fast())
    assert list(vars(restored)) == list(vars(fast()))
    own = vars(restored)["_tokenizer"]
    assert own.get_vocab() == fast()._tokenizer.get_vocab() and repr(own) == repr(fast()._tokenizer)
    assert type(copy.deepcopy(own)) is type(pickle.loads(pickle.dumps(own))) is Tokenizer
    assert own.no_padding == restored._tokenizer.no_padding, "the one that was looked at is the one that is used"


def test_it_can_be_replaced_and_removed() -> None:
    for used in (False, True):
        restored = copy_of(fast())
        if used:
            restored("ab")
        other = fast()._tokenizer
        restored._tokenizer = other
        assert restored._tokenizer is vars(restored)["_tokenizer"] is other
        del restored._tokenizer
        assert restored._tokenizer is None and "_tokenizer" not in vars(restored)
        with pytest.raises(AttributeError):
            del restored._tokenizer


def test_equal_in_every_attribute() -> None:
    assert describe(copy_of(fast())) == describe(fast())


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_are_whole(way: Callable[[Any], Any]) -> None:
    """Also in a process that knows nothing of Overmind: the pickle names none of it."""
    restored = copy_of(fast())
    other = way(restored)
    assert other("ab").input_ids == [3]
    assert b"overmind" not in pickle.dumps(copy_of(fast()))


def test_clips_own_decode_is_kept(tmp_path: Path) -> None:
    """CLIP sets a local function on its Rust tokenizer; pickle of the Rust class drops it without a word."""
    native = clip(tmp_path)
    ids = native("ab b").input_ids
    restored = copy_of(native)
    assert "</w>" in Tokenizer.decode(native._tokenizer, ids)
    assert restored.decode(ids) == native.decode(ids)
    assert list(vars(restored._tokenizer)) == ["decode"]


def test_other_attributes_of_a_rust_object_are_refused() -> None:
    tokenizer = fast()
    tokenizer._tokenizer.note = "mine"
    with pytest.raises(skeleton.Unsupported, match="attributes of its own"):
        skeleton.take(tokenizer, {}, [])
    bare = Tokenizer(models.BPE())
    bare.note = "mine"
    with pytest.raises(skeleton.Unsupported, match="attributes of its own"):
        skeleton.take([bare], {}, [])


def test_a_class_that_pickles_in_its_own_way_keeps_it() -> None:
    class Own(PreTrainedTokenizerFast):
        def __getstate__(self) -> dict[str, Any]:
            return dict(self.__dict__)

    assert quirk.reducer(Own) is None
    assert quirk.reducer(PreTrainedTokenizerFast) is not None
    assert quirk.reducer(dict) is None


def test_the_class_looks_as_before() -> None:
    copy_of(fast())
    assert PreTrainedTokenizerFast._tokenizer is None
    blank = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    assert blank._tokenizer is None


def test_the_entry_lives_until_the_rust_part_is_built() -> None:
    restored = [copy_of(fast()) for _ in range(3)]
    gc.collect()
    assert [tokenizer("ab").input_ids for tokenizer in restored] == [[3]] * 3


def test_big_tables_come_back_equal_and_keep_their_aliases() -> None:
    tokenizer = fast()
    tokenizer._vocab = {f"t{number}": number for number in range(3000)}
    tokenizer._merges = [("a", "b")] * 2000
    tokenizer.shared = tokenizer.same = {f"s{number}": 0.5 for number in range(3000)}
    tokenizer.nested = {number: [number] for number in range(3000)}
    tokenizer.outer = [tokenizer.nested[0], *range(2000)]
    taken = skeleton.take(tokenizer, {}, [])
    assert b"t2999" not in taken.skeleton and b"s2999" in taken.skeleton, "what has an alias goes through pickle"
    restored = copy_of(tokenizer)
    assert list(restored._vocab.items()) == list(tokenizer._vocab.items())
    assert restored._merges == tokenizer._merges and type(restored._merges[0]) is tuple
    assert restored.shared is restored.same and restored.shared == tokenizer.shared
    assert restored.outer[0] is restored.nested[0]
