# SPDX-License-Identifier: MIT
"""Weights that the native load only mapped stay in their file, and only then."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from overmind import _core, borrowing, dependencies, skeleton
from processes import forbid
from safetensors.torch import load_file, save_file
from segments import segment_of


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save_file({"big": torch.arange(100_000, dtype=torch.float32), "small": torch.ones(3)}, path)
    return path


def recorded(path: Path) -> list[list[Any]]:
    now = os.stat(path)
    return [[str(path), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]]


def test_a_mapped_weight_is_not_copied(weights: Path) -> None:
    native = load_file(weights)
    taken = skeleton.take(native, {}, [])
    files = recorded(weights)
    kept, borrowed = borrowing.borrow(taken.buffers, files)
    assert [item[3] for item in borrowed] == [400_000]
    segment = segment_of(taken, kept)
    assert segment.nbytes < 20_000
    borrowing.attach(segment, files, borrowed)
    restored = skeleton.restore(segment, [])
    assert torch.equal(restored["big"], native["big"]) and torch.equal(restored["small"], native["small"])
    assert restored["big"].untyped_storage().nbytes() == 400_000


def test_a_write_stays_in_this_process(weights: Path) -> None:
    taken = skeleton.take(load_file(weights), {}, [])
    files = recorded(weights)
    kept, borrowed = borrowing.borrow(taken.buffers, files)
    restored = []
    for _ in range(2):
        segment = segment_of(taken, kept)
        borrowing.attach(segment, files, borrowed)
        restored.append(skeleton.restore(segment, []))
    restored[0]["big"].add_(1)
    assert restored[1]["big"][5] == 5
    assert load_file(weights)["big"][5] == 5


def test_a_weight_that_was_written_is_copied(weights: Path) -> None:
    native = load_file(weights)
    native["big"][70_000] = -1
    taken = skeleton.take(native, {}, [])
    kept, borrowed = borrowing.borrow(taken.buffers, recorded(weights))
    assert borrowed == [] and kept == taken.buffers


def _borrowed_without_a_scan(weights: Path, written: bool, answer: Any) -> None:
    forbid("ioctl", errno.ENOTTY)
    native = load_file(weights)
    if written:
        native["big"][70_000] = -1
    taken = skeleton.take(native, {}, [])
    answer.send(len(borrowing.borrow(taken.buffers, recorded(weights))[1]))


@pytest.mark.parametrize("written", [False, True])
def test_a_kernel_before_6_7_is_asked_page_by_page(weights: Path, written: bool) -> None:
    """PAGEMAP_SCAN, an ioctl, is newer than the kernel of Debian 12."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_borrowed_without_a_scan, args=(weights, written, there))
    process.start()
    assert here.poll(60) and here.recv() == (0 if written else 1)
    process.join(60)
    assert process.exitcode == 0


def test_a_file_that_is_no_dependency_lends_nothing(weights: Path) -> None:
    taken = skeleton.take(load_file(weights), {}, [])
    assert borrowing.borrow(taken.buffers, [])[1] == []


def test_ordinary_memory_is_copied() -> None:
    taken = skeleton.take(torch.ones(100_000), {}, [])
    assert borrowing.borrow(taken.buffers, [])[1] == []


@pytest.mark.parametrize("how", ["rewritten", "replaced", "gone", "shorter"])
def test_a_file_that_changed_is_not_mapped(weights: Path, how: str) -> None:
    taken = skeleton.take(load_file(weights), {}, [])
    files = recorded(weights)
    kept, borrowed = borrowing.borrow(taken.buffers, files)
    data = weights.read_bytes()
    if how == "rewritten":
        with weights.open("r+b") as file:
            file.write(data)
    elif how == "replaced":
        other = weights.with_suffix(".new")
        other.write_bytes(data)
        os.replace(other, weights)
    elif how == "gone":
        weights.unlink()
    else:
        os.truncate(weights, len(data) - 1)
    with pytest.raises(_core.OvermindError):
        borrowing.attach(segment_of(taken, kept), files, borrowed)
    assert how == "gone" or dependencies.changed(files) is not None


def test_a_place_outside_the_file_is_refused(weights: Path) -> None:
    taken = skeleton.take(load_file(weights), {}, [])
    files = recorded(weights)
    kept, borrowed = borrowing.borrow(taken.buffers, files)
    borrowed[0][2] = files[0][3]
    with pytest.raises(IndexError):
        borrowing.attach(segment_of(taken, kept), files, borrowed)


def test_an_entry_whose_files_were_not_attached_gives_nothing(weights: Path) -> None:
    taken = skeleton.take(load_file(weights), {}, [])
    kept, _borrowed = borrowing.borrow(taken.buffers, recorded(weights))
    with pytest.raises(ValueError, match="differ in size"):
        skeleton.restore(segment_of(taken, kept), [])
