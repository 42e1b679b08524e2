# SPDX-License-Identifier: MIT
"""Tokenizers with vocabularies of any size, built instead of trained: the merges are all short words in order."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from typing import Any


def clip_tokenizer(size: int) -> Any:
    """CLIP's tokenizer with a vocabulary of `size` tokens (the real one has 49,408)."""
    from transformers import CLIPTokenizer

    vocabulary, merges = _byte_level(size, ["<|startoftext|>", "<|endoftext|>"], "</w>")
    # 77: the text encoder has no more positions.
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def byte_tokenizer(size: int, special: int) -> Any:
    """A fast byte-level BPE tokenizer of the kind that Llama 3 has; the last `special` of its tokens are reserved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reserved = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{i}|>" for i in range(special - 2))]
    vocabulary, merges = _byte_level(size, reserved)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(reserved)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=reserved[0],
        eos_token=reserved[1],
        pad_token=reserved[1],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def _byte_level(size: int, special: list[str], end: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    alphabet = _alphabet()
    tokens = alphabet + [letter + end for letter in alphabet if end]
    merges = list(itertools.islice(_merges(end), size - len(tokens) - len(special)))
    tokens += [left + right for left, right in merges] + special
    vocabulary = {token: number for number, token in enumerate(tokens)}
    assert len(vocabulary) == size, f"{len(vocabulary)} different tokens, not {size}"
    return vocabulary, merges


def _alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in every byte-level BPE vocabulary, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _merges(end: str) -> Iterator[tuple[str, str]]:
    """Pairs of letters, then triples, then words of four: every merge makes a token that no other merge makes.

    With `end` (CLIP's "</w>") each token also exists in the form that closes a word.
    """
    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    for left, right in itertools.chain(
        itertools.product(letters, letters), itertools.product(pairs, letters), itertools.product(pairs, pairs)
    ):
        yield left, right
        if end:
            yield left, right + end
