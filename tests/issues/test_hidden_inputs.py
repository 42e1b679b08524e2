# SPDX-License-Identifier: MIT
"""Found by a stranger who tried to get an old result: what a load depends on and nothing told of."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Oracle

PLACES = ["m.pt", "weights.lock", "__pycache__/m.pt"]


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ovtest-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("place", [*PLACES, "in memory", "by a link of /proc"])
def test_a_file_counts_wherever_it_lies(oracle: Oracle, tmp_path: Path, memory: Path, place: str) -> None:
    path = memory / "m.pt" if place == "in memory" else tmp_path / (place if place in PLACES else "m.pt")
    path.parent.mkdir(exist_ok=True)
    named = f"/proc/self/cwd/{path.name}" if place == "by a link of /proc" else str(path)
    runs = []
    for number in (1, 2):
        oracle.nat(f"import torch; torch.save(torch.full((9,), {number}.), {str(path)!r})")
        load = f"import torch; value = float(torch.load({named!r})[0])"
        runs += [oracle.run(load, cwd=str(path.parent)) for _ in range(2)]
    assert [run.value for run in runs] == [1, 1, 2, 2]
    if place in ("in memory", *PLACES):
        assert [run.outcomes for run in runs] == [["miss"], ["hit"]] * 2, [run.reasons for run in runs]


LINKS = {
    "realpath": "open(os.path.join(os.path.realpath(link), 'x')).read()",
    "resolve": "(pathlib.Path(link).resolve() / 'x').read_text()",
    "readlink": "os.readlink(link)",
    "libc": "resolved(ctypes.create_string_buffer(4096))",
}


@pytest.mark.parametrize("how", LINKS)
def test_a_link_that_was_read(oracle: Oracle, tmp_path: Path, how: str) -> None:
    """`latest -> v1`: whoever resolves it opens nothing of that name."""
    (tmp_path / "reads.py").write_text(f"""
import ctypes, os, pathlib
link = {str(tmp_path / "latest")!r}
def resolved(buffer):
    ctypes.CDLL(None).realpath(link.encode(), buffer)
    return os.path.basename(buffer.value.decode())
def load():
    return {LINKS[how]}
""")
    source = f"""
import sys, overmind
sys.path.insert(0, {str(tmp_path)!r})
import reads
value = overmind.load(reads.load)
"""
    runs = []
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "x").write_text(version)
        (tmp_path / "latest").unlink(missing_ok=True)
        (tmp_path / "latest").symlink_to(version)
        oracle.nat(source)  # and the files are older than what follows
        runs += [oracle.run(source) for _ in range(2)]
    assert [run.value for run in runs] == ["v1", "v1", "v2", "v2"]
    assert [run.outcomes for run in runs] == [["miss"], ["hit"]] * 2, [run.reasons for run in runs]


@pytest.mark.parametrize(
    "how", ["from settings import SCALE", "from .settings import SCALE", "def later(): import settings"]
)
def test_a_value_of_another_module_of_the_users(oracle: Oracle, tmp_path: Path, how: str) -> None:
    """The value leads nowhere by itself: an int has no module."""
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    inside = how.startswith("def")
    (package / "build.py").write_text(
        (how if not inside else "")
        + "\ndef make(name):\n    "
        + ("import settings\n    SCALE = settings.SCALE\n    " if inside else "")
        + "return [SCALE, name]\n"
    )
    runs = []
    for number in (2, 3):
        for folder in (tmp_path, package):
            (folder / "settings.py").write_text(f"SCALE = {number}\n" + "#" * number)
        source = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import own.build, overmind, settings
value = overmind.load(own.build.make, "x")[0]
"""
        oracle.nat(source)  # and the files are older than what follows
        runs += [oracle.run(source) for _ in range(2)]
    assert [run.value for run in runs] == [2, 2, 3, 3]
    assert [run.outcomes for run in runs] == [["miss"], ["hit"]] * 2, [run.reasons for run in runs]


def test_a_file_that_ctypes_opens(oracle: Oracle, tmp_path: Path) -> None:
    file = tmp_path / "data"
    (tmp_path / "native.py").write_text(
        textwrap.dedent("""
            import ctypes
            libc = ctypes.CDLL(None)
            libc.fopen.restype = ctypes.c_void_p
            def read(path, name):
                stream = ctypes.c_void_p(libc.fopen((path + name[:4]).encode(), b"rb"))
                buffer = ctypes.create_string_buffer(8)
                libc.fread(buffer, 1, 7, stream)
                libc.fclose(stream)
                return buffer.value.decode()
        """)
    )
    runs = []
    for text in ("one", "two"):
        file.write_text(text)
        source = f"""
import sys, torch
sys.path.insert(0, {str(tmp_path)!r})
import overmind
overmind.enable()
import native
value = overmind.load(native.read, {str(tmp_path) + "/"!r}, "data-file")
"""
        oracle.nat(source)
        runs += [oracle.run(source) for _ in range(2)]
    assert [run.value for run in runs] == ["one", "one", "two", "two"]


SIGNALS = """
import signal, torch
class Boom(Exception): pass
def ring(*_): raise Boom
signal.signal(signal.SIGALRM, ring)
rung = swallowed = 0
for i in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, 20e-6 + 10e-6 * i)
        try:
            torch.load(path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Boom:
        rung += 1
reasons = [r.reason for r in overmind.history() if "Boom" in r.reason and "raised" not in r.reason]
value = [rung > 0, reasons, float(torch.load(path)[0]), overmind.history()[-1].outcome]
"""


def test_what_a_signal_handler_raises_comes_out(oracle: Oracle, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    oracle.nat(f"import torch; torch.save(torch.ones(9), {str(path)!r})")
    first = oracle.run(f"import torch; torch.load({str(path)!r})")
    assert first.outcomes == ["miss"], first.reasons
    run = oracle.run(f"import overmind; path = {str(path)!r}" + SIGNALS)
    assert run.value == [True, [], 1.0, "hit"]
