# SPDX-License-Identifier: MIT
"""What a load opens is seen whoever opens it: Rust, C++, a thread, code that was imported during the load."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Oracle
from overmind import _core
from safetensors.torch import load_file, save_file


def opened(load: Any) -> dict[str, str]:
    """Path -> mode of all that `load` opened or listed."""
    _core.start_recording()
    try:
        load()
    finally:
        events = _core.stop_recording()
    return {path: mode for _event, path, mode in events}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    file = str(tmp_path / "w.safetensors")
    save_file({"w": torch.zeros(1 << 16)}, file)
    return file


def test_a_file_that_rust_opens_though_it_is_mapped_already(weights: str) -> None:
    kept = load_file(weights)
    assert opened(lambda: load_file(weights)["w"].clone()) == {weights: "r"}
    assert kept["w"].shape == (1 << 16,)


def test_a_file_that_cpp_opens(tmp_path: Path) -> None:
    file = str(tmp_path / "w.pt")
    torch.save([torch.zeros(3)], file)
    assert opened(lambda: torch._C.PyTorchFileReader(file)) == {file: "rb"}


def test_a_relative_path_is_made_absolute(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(weights))
    assert weights in opened(lambda: load_file("w.safetensors"))


def test_files_that_other_threads_read(weights: str, tmp_path: Path) -> None:
    """A pool that is older than the load may work for it."""
    text = tmp_path / "text"
    text.write_text("x")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        found = opened(lambda: [pool.submit(text.read_text).result(), pool.submit(load_file, weights).result()])
    assert {str(text), weights} <= found.keys()


def test_a_write_counts_if_the_load_may_have_made_it(tmp_path: Path) -> None:
    def write(name: str) -> None:
        (tmp_path / name).write_text("x")

    with ThreadPoolExecutor(1) as old:
        old.submit(int).result()

        def load() -> None:
            old.submit(write, "of an older thread").result()
            with ThreadPoolExecutor(1) as new:
                new.submit(write, "of the load's").result()

        found = opened(load)
    assert found == {str(tmp_path / "of the load's"): "w"}


def test_a_thread_that_flushes_a_database_is_no_reader_of_its_folder(tmp_path: Path) -> None:
    """IPython's history is kept so: natively nothing tells whether such a thread works for the load."""
    with ThreadPoolExecutor(1) as pool:
        base = pool.submit(sqlite3.connect, tmp_path / "history.sqlite", check_same_thread=False).result()

        def keep() -> None:
            with base:
                base.execute("create table lines (line)")

        found = opened(lambda: pool.submit(keep).result())
        base.close()
    assert found == {}


def test_a_thread_with_a_recording_of_its_own_keeps_its_files(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.write_text("x")
    theirs.write_text("x")
    with ThreadPoolExecutor(1) as pool:
        found = opened(lambda: [mine.read_text(), pool.submit(opened, theirs.read_text).result()])
    assert str(mine) in found and str(theirs) not in found


def test_the_original_functions_come_back(weights: str) -> None:
    assert opened(lambda: load_file(weights)) == {weights: "r"}
    _core.stop_watching()
    load_file(weights)
    assert opened(lambda: load_file(weights)) == {weights: "r"}


def test_files_are_made_with_the_permissions_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "made"
    opened(lambda: os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o640)))
    assert file.stat().st_mode & 0o777 == 0o640 & ~_umask()
    with pytest.raises(FileNotFoundError):
        opened(lambda: os.open(tmp_path / "absent", os.O_RDONLY))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_library_that_is_imported_during_the_load_is_watched(tmp_path: Path) -> None:
    """safetensors' Rust part is loaded, and opens the file, inside the recording."""
    file = str(tmp_path / "w.safetensors")
    save_file({"w": torch.zeros(4)}, file)
    source = """
        import sys
        from overmind import _core
        _core.start_recording()
        import safetensors
        with safetensors.safe_open(sys.argv[1], "np"): pass
        print(sys.argv[1] in [path for event, path, mode in _core.stop_recording() if event == "open"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source), file], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_forked_child_goes_on(weights: str) -> None:
    """It has a copy of the recording, and nothing of what other threads had begun."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_core.start_recording).result()
        _core.start_recording()
        child = os.fork()
        if child == 0:
            load_file(weights)
            own = weights in [path for _event, path, _mode in _core.stop_recording()]
            again = opened(lambda: load_file(weights)) == {weights: "r"}
            os._exit(7 if own and again else 1)
        events = _core.stop_recording()
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        pool.submit(_core.stop_recording).result()
    assert ended == 7
    assert ("process", "os.fork", "") in events
    assert weights not in [path for _event, path, _mode in events]


MYLIB = """
import os, subprocess
from concurrent.futures import ThreadPoolExecutor
from safetensors.torch import load_file

def by_rust(path):
    return load_file(os.environ["ELSEWHERE"])["w"].clone()

def by_thread(path):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(open, os.environ["ELSEWHERE"], "rb").result().read()[-4:]

def by_process(path):
    return subprocess.check_output(["tail", "-c", "4", os.environ["ELSEWHERE"]])
"""


@pytest.mark.parametrize("name", ["by_rust", "by_thread", "by_process"])
def test_a_changed_file_is_never_served(oracle: Oracle, tmp_path: Path, weights: str, name: str) -> None:
    """The function's file is no argument, and is mapped in its process before: all that tells of it is the watch."""
    (tmp_path / "mylib.py").write_text(MYLIB)
    source = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import mylib, overmind, torch
from safetensors.torch import load_file
kept = load_file({weights!r})
found = overmind.load(mylib.{name}, "unused")
value = found.view(torch.uint8)[-4:].tolist() if hasattr(found, "view") else list(found)
"""
    env = {"ELSEWHERE": weights}
    runs = []
    for number in (0.0, 2.0):
        save_file({"w": torch.full((1 << 16,), number)}, weights)
        oracle.nat(source, env=env)  # and the file is older than what follows
        runs += [oracle.run(source, env=env) for _ in range(2)]
    zero, two = [0, 0, 0, 0], [0, 0, 0, 64]
    assert [run.value for run in runs] == [zero, zero, two, two]
    last = [run.outcomes[-1] for run in runs]
    assert last == (["bypass"] * 4 if name == "by_process" else ["miss", "hit"] * 2), runs[0].reasons
