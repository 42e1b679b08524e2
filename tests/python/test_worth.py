# SPDX-License-Identifier: MIT
"""What is not faster cached is not kept, and says so; what is faster stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Oracle
from parity.cases import rooted

MYLIB = """
import time

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

class Slow:
    '''Made at once, restored slowly.'''
    def __init__(self, text):
        self.text = text
    def __reduce__(self):
        return restore, (self.text,)

def restore(text):
    burn(0.3)
    return Slow(text)

def quick(path):
    return Slow(open(path).read())

def plain(path):
    return [open(path).read()]

def slow(path):
    burn(0.8)
    return Slow(open(path).read())
"""


@pytest.fixture
def before(oracle: Oracle, folder: Path) -> str:
    (folder / "mylib.py").write_text(MYLIB)
    (folder / "text").write_text("one")
    start = rooted(folder) + "import mylib\n"
    oracle.nat(start)  # and the files are older than the processes that follow
    return start


def test_an_entry_that_is_slower_than_the_load_is_given_up(oracle: Oracle, before: str, folder: Path) -> None:
    body = before + "value = load(mylib.quick, root + '/text').text"
    runs = [oracle.run(body) for _ in range(4)]
    assert [run.outcomes for run in runs] == [["miss"], ["hit"], ["bypass"], ["bypass"]]
    assert "not faster: a hit took 0.3" in runs[2].reasons[0]
    assert {run.value for run in runs} == {"one"}
    (folder / "text").write_text("other")
    again = oracle.run(body)
    assert again.outcomes == ["miss"] and again.value == "other"


def test_an_entry_that_is_faster_stays(oracle: Oracle, before: str) -> None:
    body = before + "value = load(mylib.slow, root + '/text').text"
    assert [oracle.run(body).outcomes for _ in range(3)] == [["miss"], ["hit"], ["hit"]]


def test_a_collection_of_garbage_is_not_the_hits_own_time(oracle: Oracle, before: str) -> None:
    body = (
        before
        + """
import gc
def collecting(phase, _info):
    frame = sys._getframe(1)
    while phase == "start" and frame is not None:
        if frame.f_code.co_name == "_hit":
            mylib.burn(0.1)
            break
        frame = frame.f_back
gc.callbacks.append(collecting)
gc.set_threshold(1, 1, 1)
value = load(mylib.plain, root + "/text")
"""
    )
    assert [oracle.run(body).outcomes for _ in range(3)] == [["miss"], ["hit"], ["hit"]]
