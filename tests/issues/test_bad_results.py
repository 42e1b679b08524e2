# SPDX-License-Identifier: MIT
"""Results that no store can keep, and files that no loader can read: native result or native error, and a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

MYLIB = """
import socket, threading

class Holder:
    def __init__(self, part):
        self.part = part

def file(path):
    return Holder(open(path))

def connection(path):
    return Holder(socket.socketpair())

def lock(path):
    return Holder(threading.Lock())

def within(path):
    # Deep in what else would be kept, and met after it.
    text = open(path).read()
    return {"text": [text] * 3, "more": [Holder({"lines": (line for line in text)}), Holder(threading.Condition())]}

def generator(path):
    return Holder(line for line in open(path).readlines())

def function(path):
    text = open(path).read()
    return Holder(lambda: text)
"""
USES = {
    "file": "m.part.read()",
    "connection": "[m.part[0].send(b'abc'), m.part[1].recv(3).decode()]",
    "within": "[m['text'], list(m['more'][0].part['lines'])]",
    "lock": "[m.part.acquire(), m.part.locked()]",
    "generator": "list(m.part)",
    "function": "m.part()",
}


@pytest.fixture
def before(folder: Path) -> str:
    (folder / "mylib.py").write_text(MYLIB)
    (folder / "text").write_text("one\ntwo\n")
    return rooted(folder) + "import mylib\n"


@pytest.mark.parametrize("name", USES)
def test_live_parts_are_native(oracle: Oracle, before: str, name: str) -> None:
    run = oracle.by(before + f"m = load(mylib.{name}, root + '/text')\nvalue = {USES[name]}")
    assert run.outcomes == ["bypass"], run.records
    assert "pickle refused the result" in run.reasons[0]


CORRUPT = {
    "cut": "data[: len(data) // 2]",
    "changed": "data[:300] + bytes(200) + data[500:]",
    "no archive": "b'not an archive' * 99",
    "empty": "b''",
}


@pytest.mark.parametrize("how", CORRUPT)
@pytest.mark.parametrize("loader", ["torch.load", "torch.jit.load", "safetensors.torch.load_file"])
def test_a_corrupt_file_gives_the_native_error(
    oracle: Oracle, before: str, loader: str, how: str, folder: Path
) -> None:
    make = "torch.jit.save(torch.jit.script(torch.nn.Linear(64, 64)), path)"
    if loader == "torch.load":
        make = "torch.save(torch.nn.Linear(64, 64).state_dict(), path)"
    elif loader == "safetensors.torch.load_file":
        make = "import safetensors.torch\nsafetensors.torch.save_file(torch.nn.Linear(64, 64).state_dict(), path)"
    oracle.nat(
        before
        + f"import warnings\nwarnings.simplefilter('ignore')\npath = root + '/good'\n{make}\n"
        + f"data = open(path, 'rb').read()\nopen(root + '/bad', 'wb').write({CORRUPT[how]})"
    )
    body = (
        before
        + f"""
import warnings
import safetensors.torch
warnings.simplefilter("ignore")
value = []
for _ in range(2):
    try:
        {loader}(root + "/bad")
        value.append("loaded")
    except Exception as error:
        value.append([type(error).__name__, str(error)[:200]])
"""
    )
    native = oracle.nat(body).value
    assert oracle.run(body).value == native
    assert native[0] != "loaded" or how == "changed"


MOVED = """
import os
class Part:
    def __init__(self, text):
        self.text = text
    def __setstate__(self, state):
        if "MOVED" in os.environ:
            raise ModuleNotFoundError("No module named 'older'\\nand more")
        self.__dict__.update(state)
def part(path):
    return Part(open(path).read())
def broken(path):
    if "MOVED" in os.environ:
        raise KeyError("of the load itself")
    return Part(open(path).read())
"""


def test_what_can_not_be_restored_is_made_anew(oracle: Oracle, before: str, folder: Path) -> None:
    """Else it would fail at every load. Once in a process: what is made anew may be of use to another one."""
    (folder / "mylib.py").write_text(MOVED)
    source = before + "value = [load(mylib.part, root + '/text').text for _ in range(3)]"
    entry = oracle.hit(source).records[0][3]
    moved = oracle.run(source, env={"MOVED": "1"})
    assert moved.value == ["one\ntwo\n"] * 3
    assert moved.outcomes == ["miss", "bypass", "bypass"]
    why = "what was kept could not be restored (ModuleNotFoundError: No module named 'older')"
    assert moved.reasons == [why] * 3
    remade = moved.records[0][3]
    assert remade != entry
    assert {tuple(record[::3]) for record in oracle.run(source).records} == {("hit", remade)}


def test_the_loads_own_exception_after_a_failed_restore(oracle: Oracle, before: str, folder: Path) -> None:
    (folder / "mylib.py").write_text(MOVED)
    source = before + "load(mylib.broken, root + '/text')"
    oracle.hit(source)
    run = oracle.run(source, env={"MOVED": "1"}, check=False)
    assert run.stderr.splitlines()[-1] == "KeyError: 'of the load itself'"
    assert "could not be restored" not in run.stderr and "another exception" not in run.stderr
