# SPDX-License-Identifier: MIT
"""S11: tokenizers with Python parts, unpickling that reads the disk, lost special tokens.

A tokenizer is half Rust, half Python. Caches that pickled it lost added tokens or the chat template, could not pickle
a custom Python component at all, or pickled only the path of the vocabulary: they then failed, or answered, for a file
that was no longer there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

MAKE = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = ["[UNK]", "[PAD]", "[CLS]", "hello", "world", "tool", "hel", "lo"]
made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
t = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
                            model_max_length=17, padding_side="left")
t.add_tokens(["<added>"])
t.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
t.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
t.save_pretrained(root + "/t")
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    (folder / "mylib.py").write_text(MYLIB)
    start = rooted(folder)
    oracle.nat(start + MAKE)
    return start + "from transformers import AutoTokenizer, PreTrainedTokenizerFast\n"


MYLIB = """
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import PreTokenizer


class Halves:
    def halve(self, i, text):
        return [text[: -2], text[-2:]]

    def pre_tokenize(self, pretok):
        pretok.split(self.halve)


def custom(path):
    made = Tokenizer.from_file(path)
    made.pre_tokenizer = PreTokenizer.custom(Halves())
    return made
"""


def test_added_and_special_tokens_and_the_template(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
t = PreTrainedTokenizerFast.from_pretrained(root + "/t")
value = [t.encode("hello <added> <two> world nothing"), len(t), t.vocab_size, t.special_tokens_map, t.chat_template,
         t.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False), t.padding_side,
         t.model_max_length, t.decode([3, 9, 4], skip_special_tokens=True), t.all_special_ids,
         t(["hello", "hello world"], padding=True)["attention_mask"], describe(t)]
"""
    )
    ids, length, size, special, template, chat, side, longest, decoded, special_ids, mask, _all = run.value
    assert ids == [3, 8, 10, 4, 0]
    assert length == 11 and size == 8
    assert special["unk_token"] == "[UNK]" and special["cls_token"] == "[CLS]" and special["pad_token"] == "[PAD]"
    assert template.startswith("{% for m in messages %}") and chat == "<user>hi"
    assert side == "left" and longest == 17
    assert "<one>" not in decoded and "hello" in decoded and {9, 10} <= set(special_ids)
    assert mask == [[0, 1], [1, 1]]


def test_two_loads_do_not_share_added_tokens(oracle: Oracle, before: str) -> None:
    run = oracle.hit(
        before
        + """
a = AutoTokenizer.from_pretrained(root + "/t")
a.add_tokens(["<mine>"])
a.padding_side = "right"
b = AutoTokenizer.from_pretrained(root + "/t")
value = [len(a), len(b), a.padding_side, b.padding_side, b.encode("<mine>")]
"""
    )
    assert run.value[:4] == [12, 11, "right", "left"]


def test_a_custom_python_component(oracle: Oracle, before: str) -> None:
    """A bypass is right: the component is a Python object inside Rust, and tokenizers refuses to serialise it."""
    run = oracle.by(
        before
        + "import mylib\nt = load(mylib.custom, root + '/t/tokenizer.json')\n"
        + "value = [t.encode('hello').tokens, type(t).__name__]"
    )
    assert run.value == [["hel", "lo"], "Tokenizer"]


def test_a_vocabulary_that_was_moved_away(oracle: Oracle, before: str, folder: Path) -> None:
    body = (
        before
        + """
try:
    value = AutoTokenizer.from_pretrained(root + "/t").encode("hello")
except Exception as error:
    value = [type(error).__name__, isinstance(error, OSError), str(error)]
"""
    )
    assert oracle.hit(body).value == [3]
    os.rename(folder / "t", folder / "moved")
    native = oracle.nat(body)
    assert native.value[1] is True
    gone = oracle.run(body)
    assert gone.value == native.value and "hit" not in gone.outcomes
    # Only the vocabulary gone, the folder still there.
    os.rename(folder / "moved", folder / "t")
    assert oracle.run(body).value == [3]
    os.rename(folder / "t" / "tokenizer.json", folder / "vocabulary")
    native = oracle.nat(body)
    without = oracle.run(body)
    assert native.value != [3] and without.value == native.value
    os.rename(folder / "vocabulary", folder / "t" / "tokenizer.json")
    assert oracle.run(body).value == [3]


def test_the_moved_folder_under_its_new_name(oracle: Oracle, before: str, folder: Path) -> None:
    body = before + "t = AutoTokenizer.from_pretrained(root + '/{}')\nvalue = [t.encode('hello'), t.name_or_path]"
    assert oracle.hit(body.format("t")).value[0] == [3]
    os.rename(folder / "t", folder / "moved")
    assert oracle.hit(body.format("moved")).value == [[3], str(folder / "moved")]


def test_the_vocabulary_is_not_read_again_at_a_hit(oracle: Oracle, before: str, folder: Path) -> None:
    """Another vocabulary at the same path is another tokenizer."""
    body = before + "t = AutoTokenizer.from_pretrained(root + '/t')\nvalue = [t.encode('hello'), len(t)]"
    assert oracle.hit(body).value == [[3], 11]
    path = folder / "t" / "tokenizer.json"
    path.write_text(path.read_text().replace('"hello": 3', '"olleh": 3'))
    changed = oracle.run(body)
    assert changed.value == [[0], 11] == oracle.nat(body).value
    assert "changed" in changed.reasons[0]
