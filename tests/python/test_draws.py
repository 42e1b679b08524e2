# SPDX-License-Identifier: MIT
"""A load that draws from the system's random numbers is not cached; one in which only a library does so is."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import random
import secrets
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.ensemble
import torch
from conftest import Oracle, settle
from overmind import draws, key
from overmind.loader import Loader
from overmind.recording import Recording


def work(*args: Any, **kwargs: Any) -> None:
    """Stands for a loader; what it does is given by the test."""


@pytest.fixture(autouse=True)
def old_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This file may be newer than the process that tests it. Also: tempfile draws once per process, so anew here."""
    monkeypatch.setattr("overmind.modules.PROCESS_START_NS", 1 << 62)
    monkeypatch.setattr(tempfile, "_name_sequence", None)
    yield


def refusal(load: Callable[[], Any], loader: Loader = Loader(name="overmind.load")) -> str | None:  # noqa: B008
    with Recording(key.make_request(loader, work, (), {}, None)) as recording:
        load()
    return recording.refusal


def in_a_thread(draw: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(draw).result()


def forgotten() -> float:
    """The generator is gone when the load is done."""
    return float(np.random.RandomState(None).rand())


def beside_a_seeded_one() -> Any:
    seeded = np.random.RandomState(0)
    return np.random.SeedSequence().entropy, seeded


def reseeded() -> Any:
    generator = np.random.RandomState(5)
    generator.seed()
    return generator


DRAWS = {
    "os.urandom": lambda: os.urandom(4),
    "os.getrandom": lambda: os.getrandom(4),
    "uuid4": uuid.uuid4,
    "secrets": lambda: secrets.token_bytes(4),
    "randbits": lambda: secrets.randbits(128),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "Random": lambda: random.Random().random(),
    "default_rng": lambda: np.random.default_rng().random(),
    "RandomState": np.random.RandomState,
    "forgotten": forgotten,
    "beside_a_seeded_one": beside_a_seeded_one,
    "reseeded": reseeded,
    "MT19937": np.random.MT19937,
    "SeedSequence": np.random.SeedSequence,
    "ctypes": lambda: ctypes.CDLL(None).getrandom(ctypes.create_string_buffer(4), 4, 0),
    "thread": lambda: in_a_thread(uuid.uuid4),
}
DEVICES = {
    "/dev/urandom": lambda: Path("/dev/urandom").open("rb").close(),
    "/dev/random": lambda: io.FileIO("/dev/random").close(),
    "bytes": lambda: os.close(os.open(b"/dev/urandom", os.O_RDONLY)),
    "thread": lambda: in_a_thread(Path("/dev/urandom").open).close(),
    "torch.Generator": lambda: torch.Generator().seed(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_a_load_draws_from_the_system_is_noticed(name: str) -> None:
    assert refusal(DRAWS[name]) == "it drew random numbers from the system (getrandom)"


@pytest.mark.parametrize("name", DEVICES)
def test_what_a_load_reads_of_a_random_device_is_noticed(name: str) -> None:
    assert "it drew random numbers from the system (/dev/" in (refusal(DEVICES[name]) or "")


SEEDED = np.random.RandomState(1), np.random.default_rng(1)


@pytest.mark.parametrize(
    "load",
    [
        lambda: random.Random(1).random(),
        lambda: np.random.default_rng(1).random(),
        lambda: np.random.RandomState(0).rand(),
        lambda: np.random.RandomState([1, 2]).rand(),
        lambda: [np.random.RandomState(seed).rand() for seed in range(2000)],  # some meet a garbage collection
        lambda: pickle.loads(pickle.dumps(SEEDED)),
        lambda: os.rmdir(tempfile.mkdtemp()),
        lambda: torch.randn(2, generator=torch.Generator().manual_seed(1)),
        lambda: sklearn.ensemble.RandomForestClassifier(3, random_state=1).fit([[0], [1]], [0, 1]).predict([[0]]),
    ],
)
def test_what_says_its_seed_or_names_a_file_is_no_draw(load: Callable[[], Any]) -> None:
    assert refusal(load) is None


def test_a_draw_of_a_module_that_is_imported_belongs_to_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawing_module.py").write_text("import os, uuid\nNAME = uuid.uuid4()\ndef draw(): os.urandom(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    settle(tmp_path)
    assert refusal(lambda: __import__("drawing_module")) is None
    assert refusal(lambda: __import__("drawing_module").draw()) is not None


def test_a_thread_of_somebody_else_draws_for_itself() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert refusal(lambda: pool.submit(os.urandom, 3).result()) is None


def test_a_loader_of_a_library_may_name_things() -> None:
    assert refusal(uuid.uuid4, Loader(name="x", target="file", libraries=("test_draws",))) is None


def test_an_interrupt_that_comes_while_a_draw_is_judged_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws.Draws, "note", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            refusal(lambda: [os.urandom(3), threading.Event().wait(5)])
    finally:
        signal.signal(signal.SIGINT, before)


MYLIB = """
import importlib, os, sys

def first_import(path):
    importlib.import_module("uuid"), importlib.import_module("random"), importlib.import_module("tempfile")
    return open(path).read()

def drawn(path):
    import uuid
    return str(uuid.uuid4())
"""


@pytest.mark.parametrize("name", ["first_import", "drawn"])
def test_through_the_store(oracle: Oracle, tmp_path: Path, name: str) -> None:
    (tmp_path / "mylib.py").write_text(MYLIB)
    (tmp_path / "data").write_text("x")
    source = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import mylib, overmind
for module in ("uuid", "tempfile"):
    sys.modules.pop(module, None)
value = overmind.load(mylib.{name}, {str(tmp_path / "data")!r})
"""
    oracle.nat(source)  # and the files are older than what follows
    first, second = (oracle.run(source) for _ in range(2))
    assert [first.outcomes[-1], second.outcomes[-1]] == (["miss", "hit"] if name == "first_import" else ["bypass"] * 2)
    assert (first.value == second.value) == (name == "first_import")
