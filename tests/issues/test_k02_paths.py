# SPDX-License-Identifier: MIT
"""K02: one name, two folders; one folder, many names.

A cache that keys a load by the text of its path answers './m' in folder B with what './m' was in folder A, because its
daemon, or its key, knows one working folder only. The opposite fault costs time: the same call spelled in another way
(Path or str, keywords in another order, a default written out) is loaded and stored twice. And a key that compares
values with == takes 1, True and 1.0 for one argument.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle
from processes import write_module

TWO_FOLDERS = """
import os, torch
from safetensors.torch import load_file
from transformers import BertForMaskedLM
value = []
for name in "AB":
    os.chdir({root!r} + "/" + name)
    value.append([
        torch.load("./w.pt")["x"].tolist(),
        load_file("w.safetensors")["x"].tolist(),
        float(BertForMaskedLM.from_pretrained("./m").bert.embeddings.LayerNorm.weight.sum()),
    ])
"""


def two_folders(oracle: Oracle, folder: Path) -> None:
    oracle.nat(f"""
        import os, tiny, torch
        from safetensors.torch import save_file
        for name, number in (("A", 1.0), ("B", 2.0)):
            here = {str(folder)!r} + "/" + name
            os.mkdir(here)
            tiny.bert(here + "/m", fill=number)
            torch.save({{"x": torch.full((3,), number)}}, here + "/w.pt")
            save_file({{"x": torch.full((3,), number)}}, here + "/w.safetensors")
        os.symlink("A", {str(folder)!r} + "/current")
    """)


def test_a_relative_path_belongs_to_the_working_folder(oracle: Oracle, folder: Path) -> None:
    two_folders(oracle, folder)
    run = oracle.hit(TWO_FOLDERS.format(root=str(folder)))
    assert run.value == [[[1.0] * 3, [1.0] * 3, 16.0], [[2.0] * 3, [2.0] * 3, 32.0]]
    assert len({record[3] for record in run.records}) == 6


def test_spellings_of_one_file_give_its_content(oracle: Oracle, folder: Path) -> None:
    two_folders(oracle, folder)
    run = oracle.hit(
        f"""
        import os, torch
        from pathlib import Path
        os.chdir({str(folder)!r} + "/A")
        os.environ["HOME"] = {str(folder)!r}
        names = ["w.pt", Path("w.pt"), "./w.pt", "../A/w.pt", "../B/../A/w.pt", os.path.abspath("w.pt"),
                 os.path.expanduser("~/A/w.pt"), "../current/w.pt"]
        value = [torch.load(name)["x"].tolist() for name in names]
        """
    )
    assert run.value == [[1.0] * 3] * 8
    entries = [record[3] for record in run.records]
    assert entries[0] == entries[1], "a Path and its text"
    assert entries[5] == entries[6], "an expanded ~ and the same path written out"


def test_a_tilde_is_not_expanded_where_the_library_does_not(oracle: Oracle, folder: Path) -> None:
    two_folders(oracle, folder)
    run = oracle.by(
        f"""
        import os, torch
        os.environ["HOME"] = {str(folder)!r}
        torch.load(os.path.expanduser("~/A/w.pt"))
        try:
            torch.load("~/A/w.pt")
            value = "loaded"
        except FileNotFoundError as error:
            value = [type(error).__name__, error.filename]
        """
    )
    assert run.value == ["FileNotFoundError", "~/A/w.pt"]


def test_a_link_is_followed_at_every_load(oracle: Oracle, folder: Path) -> None:
    two_folders(oracle, folder)
    source = f"""
        import torch
        value = torch.load({str(folder)!r} + "/current/w.pt")["x"].tolist()
    """
    assert oracle.hit(source).value == [1.0] * 3
    (folder / "current").unlink()
    (folder / "current").symlink_to("B")
    assert oracle.run(source).value == [2.0] * 3
    assert oracle.hit(source).value == [2.0] * 3


def test_the_object_names_the_path_as_the_caller_wrote_it(oracle: Oracle, folder: Path) -> None:
    """`_name_or_path` is part of the result: sharing must not put another caller's spelling there."""
    two_folders(oracle, folder)
    run = oracle.hit(
        f"""
        import os
        from pathlib import Path
        from transformers import BertForMaskedLM
        os.chdir({str(folder)!r} + "/A")
        load = BertForMaskedLM.from_pretrained
        value = [load(name).name_or_path for name in ("m", Path("m"), "./m", "../A/m", "../current/m")]
        """
    )
    assert run.value == ["m", "m", "./m", "../A/m", "../current/m"]
    assert run.records[0][3] == run.records[1][3], "Path('m') and 'm' are one call"


def test_equivalent_calls_share_an_entry(oracle: Oracle, folder: Path) -> None:
    two_folders(oracle, folder)
    run = oracle.hit(
        f"""
        import os, torch
        os.chdir({str(folder)!r} + "/A")
        calls = [
            torch.load("w.pt", map_location="cpu", weights_only=True),
            torch.load("w.pt", weights_only=True, map_location="cpu"),
            torch.load("w.pt", "cpu", weights_only=True),
            torch.load(f="w.pt", map_location="cpu", weights_only=True, mmap=None),
        ]
        value = [call["x"].tolist() for call in calls]
        """
    )
    assert run.value == [[1.0] * 3] * 4
    assert len({record[3] for record in run.records}) == 1


def test_equal_numbers_of_different_type_are_different_arguments(oracle: Oracle, folder: Path) -> None:
    write_module(folder / "mylib.py", "def load(a, b=2):\n    return [type(a).__name__, repr(a), type(b).__name__]\n")
    run = oracle.hit(
        f"""
        import sys, overmind
        sys.path.insert(0, {str(folder)!r})
        import mylib
        value = [overmind.load(mylib.load, a) for a in (1, True, 1.0, "1", b"1", 0.0, -0.0)]
        value += [overmind.load(mylib.load, a=1, b=2), overmind.load(mylib.load, b=2, a=1)]
        value.append(overmind.load(mylib.load, 1, 2))
        """
    )
    types = [["int", "1"], ["bool", "True"], ["float", "1.0"], ["str", "'1'"], ["bytes", "b'1'"]]
    types += [["float", "0.0"], ["float", "-0.0"], ["int", "1"], ["int", "1"], ["int", "1"]]
    assert run.value == [[*pair, "int"] for pair in types]
    entries = [record[3] for record in run.records]
    assert len(set(entries[:7])) == 7, "two arguments that differ were taken for one"
    assert {entries[0], *entries[7:]} == {entries[0]}, "equivalent calls made several entries"
