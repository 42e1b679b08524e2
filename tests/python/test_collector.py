# SPDX-License-Identifier: MIT
"""The collector during a load: spared what finds nothing, and as it was when the load is done."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Oracle
from overmind import collector

USUAL = (700, 10, 10)
SPARED = (700, 1 << 30, 10)


@pytest.fixture(autouse=True)
def usual_thresholds() -> Iterator[None]:
    found = gc.get_threshold()
    gc.set_threshold(*USUAL)
    gc.collect()
    yield
    gc.set_threshold(*found)


class Node:
    """May be part of a cycle."""

    other: Node


def cycle() -> weakref.ref[Node]:
    node = Node()
    node.other = node
    return weakref.ref(node)


def many_objects(count: int = 20_000) -> list[list[int]]:
    return [[number] for number in range(count)]


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected, one by one."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def test_only_the_youngest_is_collected_and_nothing_is_made_up_for(collections: list[int]) -> None:
    with collector.young_only():
        kept = many_objects()
        freed = cycle()
        more = many_objects(2_000)
        assert freed() is None
        assert set(collections) == {0}
    collections.clear()
    more += many_objects(4_000)
    assert 2 not in collections and gc.get_threshold() == USUAL
    assert kept and more


def test_older_garbage_is_collected_later() -> None:
    node = Node()
    node.other = node
    gone = weakref.ref(node)
    with collector.young_only():
        gc.collect(0)
        del node
    gc.collect()
    assert gone() is None


def test_loads_that_follow_each_other_are_collected_at_last(collections: list[int]) -> None:
    """As Python would: a loop that leaves each model behind in a cycle keeps some, not all."""
    gone = []
    for _ in range(200):
        with collector.off():
            kept = many_objects(10_000)
        gone.append(cycle())
        del kept
    assert 1 <= collections.count(2) <= 10
    assert sum(ref() is not None for ref in gone) < 100


def test_a_small_load_leaves_the_counts_alone() -> None:
    gc.collect(1)
    before = gc.get_count()[1:]
    with collector.off():
        kept = many_objects(100)
    assert gc.get_count()[1:] == before and kept


def test_an_interrupt_leaves_it_on() -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    deadline = time.monotonic() + 60
    try:
        while interrupted < 2_000:
            assert time.monotonic() < deadline
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 40e-6))
                for _ in range(200):
                    with collector.off():
                        pass
                    with collector.young_only():
                        pass
            except KeyboardInterrupt:
                interrupted += 1
            assert gc.isenabled() and gc.get_threshold() == USUAL
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_thresholds_that_another_thread_put_back_are_mended_by_the_next_load() -> None:
    with collector.young_only():
        found = gc.get_threshold()
    gc.set_threshold(*found)
    with collector.young_only():
        pass
    assert gc.get_threshold() == USUAL


def test_the_last_of_several_puts_back() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector.young_only():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    with pytest.raises(KeyError), collector.young_only():
        raise KeyError
    assert gc.get_threshold() == SPARED
    leave.set()
    thread.join()
    assert gc.get_threshold() == USUAL


def test_what_others_set_stays() -> None:
    with collector.young_only():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)
    gc.disable()
    try:
        with collector.young_only():
            assert gc.get_threshold() == (500, 5, 5)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector.young_only():
            assert gc.get_threshold() == USUAL
        with collector.off():
            assert not gc.isenabled()
        assert gc.get_freeze_count() == frozen > 0 and gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_fork_has_the_usual_thresholds() -> None:
    with collector.young_only():
        child = os.fork()
        if child == 0:
            inside = gc.get_threshold()
            with collector.young_only():
                again = gc.get_threshold()
            os._exit(0 if (inside, again, gc.get_threshold()) == (USUAL, SPARED, USUAL) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert gc.get_threshold() == SPARED


def test_during_first_loads_of_a_library_and_not_of_a_function(oracle: Oracle, tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(
        "import gc\n"
        "class Noting:\n"
        "    seen = []\n"
        "    def __setstate__(self, state):\n"
        "        self.seen.append(gc.get_threshold())\n"
        "def make():\n"
        "    made = Noting()\n"
        "    made.__setstate__(None)\n"
        "    return made\n"
    )
    told = oracle.run(
        f"""
        import gc, sys
        gc.set_threshold(700, 10, 10)
        sys.path.insert(0, {str(tmp_path)!r})
        import noting, torch
        one = noting.Noting()
        one.value = 1
        torch.save(one, {str(tmp_path / "one.pt")!r})
        torch.load({str(tmp_path / "one.pt")!r}, weights_only=False)
        overmind.load(noting.make)
        value = [noting.Noting.seen, gc.get_threshold()]
        """
    )
    seen, after = told.value
    assert [tuple(each) for each in seen[:2]] == [SPARED, USUAL] and tuple(after) == USUAL
    assert told.records[0][2] == "torch.load" and told.records[0][0] != "hit"
