# SPDX-License-Identifier: MIT
"""The archive of a TorchScript module, from the file that torch.jit.load has just read.

To print a module's code anew takes 0.4 s for a traced SD 1.5 UNet, and code that an older torch wrote would come back
as today's: it computes the same, but its graph is another. So the file's own records are taken, 0.06 s: its code, its
version, the pickle of its attributes. Only the tensors are left out; the pickle names them by the file's numbers, and
read() tells which storage of the loaded module each number is.

Whatever is not sure to be plain (attributes that are neither modules, tensors nor numbers, big constants in the code,
another byte order) is None: then the module is printed.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_CODE = "code/"
_PACKAGE = ".data/ts_code/"  # where torch.package keeps code, and in 0/ the first module's pickle
_PLAIN = (bool, int, float, str, type(None))


class _UnknownError(Exception):
    """Something in the file that is not known to come back the same."""


def _first(value: Any, *_rest: Any) -> Any:
    return value


class _Part:
    """Stands for a scripted module of the pickle; its attributes are its state."""


class _Tensor:
    """Stands for a tensor: the file's number of its storage, and where in it it begins."""

    def __init__(self, storage: str, offset: int, *_rest: Any) -> None:
        self.storage, self.offset = storage, offset


class _Reader(pickle.Unpickler):
    """Builds _Part and _Tensor; nothing of the file's code is run."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Part
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.jit._pickle":  # build_intlist() and others of its kind, and restore_type_tag()
            return _first
        if module == "torch" and name.endswith("Storage"):
            return name
        raise _UnknownError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid[2]


def read(path: str, compiled: Any, big: int) -> tuple[bytes, dict[int, str]] | None:
    """The archive of `compiled` (torch._C.ScriptModule), which torch.jit.load made of this file, in torch.package's
    form; and by the `_cdata` of each storage of its attributes the name that the archive has for it. None: not sure.

    `big`: bytes from which on a constant of the code must not lie in the archive.
    """
    try:
        return _read(path, compiled, big)
    except (
        _UnknownError,
        pickle.PickleError,
        RuntimeError,
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ):
        return None


def _read(path: str, compiled: Any, big: int) -> tuple[bytes, dict[int, str]]:
    import torch

    reader = torch._C.PyTorchFileReader(path)
    names = reader.get_all_records()
    if "byteorder" in names and reader.get_record("byteorder") != sys.byteorder.encode():
        raise _UnknownError("byte order")
    state = reader.get_record("data.pkl")
    storages: dict[int, str] = {}
    _match(_Reader(io.BytesIO(state)).load(), compiled, storages)
    if len(set(storages.values())) < len(storages):
        raise _UnknownError("a storage that became two")
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    writer.set_min_version(_version(reader, names))

    def write(name: str, data: bytes) -> None:
        writer.write_record(name, data, len(data))

    for name in names:
        if name.startswith(_CODE):
            write(_PACKAGE + name, reader.get_record(name))
    write(f"{_PACKAGE}0/data.pkl", state)
    _write_constants(reader, names, write, big)
    writer.write_end_of_file()
    return file.getvalue(), storages


def _version(reader: Any, names: list[str]) -> int:
    for name in (".data/version", "version"):
        if name in names:
            return int(reader.get_record(name))
    raise _UnknownError("no version")


def _write_constants(reader: Any, names: list[str], write: Callable[[str, bytes], None], big: int) -> None:
    """The constants of the code have numbers of their own, from 0 as well: here the number 3 is "constant 3"."""
    if "constants.pkl" not in names:
        return
    data = reader.get_record("constants.pkl")
    renamed, done = [], 0
    for op, argument, position in pickletools.genops(data):
        if op.name == "BINUNICODE" and position is not None and str(argument).isdigit():
            text = f"constant {argument}".encode()
            renamed += [data[done:position], b"X", len(text).to_bytes(4, "little"), text]
            done = position + 5 + len(str(argument))
    write(f"{_PACKAGE}0/constants.pkl", b"".join([*renamed, data[done:]]))
    for name in names:
        folder, _, number = name.partition("/")
        if folder == "constants":
            record = reader.get_record(name)
            if len(record) >= big:
                raise _UnknownError("a big constant")
            write(f".data/constant {number}", record)


def _match(part: Any, compiled: Any, storages: dict[int, str]) -> None:
    """Walks the pickle's tree beside the loaded module, and notes which storage each number became."""
    import torch

    if type(part) is not _Part or not isinstance(compiled, torch._C.ScriptModule):
        raise _UnknownError("no module")
    for name, value in vars(part).items():
        if type(value) is _Part:
            _match(value, compiled.getattr(name), storages)
        elif type(value) is _Tensor:
            tensor = compiled.getattr(name)
            key = tensor.untyped_storage()._cdata
            if tensor.storage_offset() != value.offset or storages.setdefault(key, value.storage) != value.storage:
                raise _UnknownError("a tensor that lies elsewhere")
        elif not _is_plain(value):
            raise _UnknownError("an attribute that is no plain value")


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return type(value) in _PLAIN
