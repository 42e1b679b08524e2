# SPDX-License-Identifier: MIT
"""K05: loads from open files: where the file stands, what it holds, which object it is.

Several objects saved one after another in one file are read by loading from it several times: each load starts where
the one before stopped and moves the position on. A cache keyed by the identity of the file object, or by its whole
content, gives the first object again; one that does not move the position breaks the next native load.
"""

from __future__ import annotations

from pathlib import Path

from conftest import Oracle

ATTEMPT = """
import io, torch
value = []
def attempt(file):
    try:
        value.append([torch.load(file).tolist(), file.tell()])
    except Exception as error:
        value.append([type(error).__name__, file.tell()])
"""


def test_legacy_saves_in_one_file_are_read_in_turn(oracle: Oracle) -> None:
    run = oracle.by(
        ATTEMPT
        + """
b = io.BytesIO()
torch.save(torch.arange(3.), b, _use_new_zipfile_serialization=False)
torch.save(torch.arange(4.) + 5, b, _use_new_zipfile_serialization=False)
b.seek(0)
for _ in range(3):
    attempt(b)
"""
    )
    first, second, third = run.value
    assert first[0] == [0.0, 1.0, 2.0] and second[0] == [5.0, 6.0, 7.0, 8.0]
    assert 0 < first[1] < second[1] == third[1]
    assert third[0] == "EOFError"


def test_zip_saves_in_one_file_fail_as_they_do_natively(oracle: Oracle) -> None:
    run = oracle.by(
        ATTEMPT
        + """
b = io.BytesIO()
torch.save(torch.arange(3.), b)
torch.save(torch.arange(4.) + 5, b)
b.seek(0)
attempt(b)
attempt(b)
"""
    )
    assert run.value[0][0] == [0.0, 1.0, 2.0] and run.value[0][1] > 0
    assert run.value[1][0] == "UnpicklingError"


def test_a_rewritten_buffer_is_read_again(oracle: Oracle) -> None:
    run = oracle.by(
        ATTEMPT
        + """
b = io.BytesIO()
for number in (1., 2., 3.):
    b.seek(0)
    torch.save(torch.full((2,), number), b)
    b.seek(0)
    attempt(b)
"""
    )
    assert [numbers for numbers, _position in run.value] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]


def test_an_open_file_stands_where_the_native_load_leaves_it(oracle: Oracle, folder: Path) -> None:
    run = oracle.by(
        ATTEMPT
        + f"""
path = {str(folder / "w.pt")!r}
with open(path, "wb") as file:
    file.write(b"head")
    torch.save(torch.arange(3.), file, _use_new_zipfile_serialization=False)
    torch.save(torch.arange(2.), file, _use_new_zipfile_serialization=False)
with open(path, "rb") as file:
    file.seek(4)
    attempt(file)
    attempt(file)
with open(path, "rb", buffering=0) as file:
    file.seek(4)
    attempt(file)
"""
    )
    assert [numbers for numbers, _position in run.value] == [[0.0, 1.0, 2.0], [0.0, 1.0], [0.0, 1.0, 2.0]]
    assert run.value[0][1] == run.value[2][1] > 4


def test_a_stream_that_cannot_seek_is_the_native_error(oracle: Oracle) -> None:
    run = oracle.by(
        ATTEMPT
        + """
class Stream(io.RawIOBase):
    def __init__(self, data): self.rest = io.BytesIO(data)
    def readable(self): return True
    def seekable(self): return False
    def readinto(self, out):
        data = self.rest.read(len(out))
        out[: len(data)] = data
        return len(data)
b = io.BytesIO()
torch.save(torch.arange(3.), b)
try:
    value = torch.load(Stream(b.getvalue())).tolist()
except Exception as error:
    value = [type(error).__name__, str(error).split(".")[0]]
"""
    )
    assert run.value[0] == "UnsupportedOperation" and "seek" in run.value[1]
