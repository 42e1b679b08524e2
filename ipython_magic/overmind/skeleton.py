# SPDX-License-Identifier: MIT
"""A loaded object <-> its skeleton (a pickle with the big bytes taken out) and its buffers.

Plain pickle semantics: what pickle would give back is what a hit gives back, with two differences. Tensors that
the fast path of overmind._torch keeps exactly skip their Python rebuild functions, and storages and the buffers of
pickle protocol 5 (numpy, arrow) lie in the segment instead of the pickle. Where pickle is known to lose something in
silence, the object is refused: unfit.py holds the table.

Thread safety: take() and restore() may run on any thread, several at once.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import struct
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from overmind import _core, collector, log, modes, torch_fallback, unfit
from overmind.quirks import bitsandbytes, nn_modules, tokenizers, torch_hooks, torchao, torchscript, transformers

_QUIRKS = (tokenizers, transformers, torch_hooks, bitsandbytes, torchao)


class Unsupported(Exception):  # noqa: N818 - an outcome, not a failure
    """The result can't be kept exactly; str() says why, for the user."""


@dataclass(slots=True)
class Snapshot:
    """Everything that a segment needs. `buffers` are live memory: publish before the result is changed."""

    skeleton: bytes
    tensors: bytes
    buffers: list[tuple[int, int]]  # (address, nbytes): storages first, then pickle's own buffers
    keepalive: list[Any]  # what owns that memory
    names: frozenset[tuple[str, str]]  # (module, qualified name) of all classes and functions in the pickle
    used: frozenset[int]  # numbers of the substitutes that are part of the result
    nbytes: int  # of all of it


def take(
    result: Any, substitutes: dict[int, int], substitute_objects: list[Any], archive: str | None = None
) -> Snapshot:
    """Pickles `result` with its big bytes left where they are: 30 ms for a diffusers pipeline.

    `substitutes`: id(object) -> number for the objects that a hit replaces by the caller's own, which
    `substitute_objects` keeps alive. `archive`: the file that torch.jit.load has just read `result` from. Raises
    Unsupported only; leaves `result` as it is.
    """
    try:
        with collector.off():
            return _take(result, substitutes, archive)
    except Unsupported:
        raise
    except RecursionError:
        raise Unsupported("the result is nested too deeply to be pickled") from None
    except Exception as error:
        raise Unsupported(f"pickle refused the result: {_first_line(error)}") from error


def restore(segment: _core.Segment, substitutes: list[Any]) -> Any:
    """The object of a segment, new and independent, over this process's private pages.

    `substitutes`: the caller's objects in the order of their numbers. Raises whatever unpickling raises:
    the entry is no use then. For the caller to do with the collector off: 100,000 new objects set off a dozen
    collections, a third of the time.
    """
    storages, first, next_hook_id = _header(segment.tensors)
    with modes.without_torch_modes():
        backend = _backend(needs_torch=storages > 0)
        source = segment if backend is torch_fallback else segment.capsule()
        items = backend.build(source, substitutes)
        buffers = (segment.buffer(index) for index in range(first, segment.buffer_count))
        unpickler = pickle.Unpickler(io.BytesIO(segment.skeleton), buffers=buffers)
        unpickler.persistent_load = items.__getitem__  # type: ignore[method-assign]
        result = unpickler.load()
        if next_hook_id:
            _keep_hook_ids_apart(next_hook_id)
    return result


def warm() -> None:
    """Imports what restore() needs, if torch is there."""
    _backend(needs_torch=False)


def _take(result: Any, substitutes: dict[int, int], archive: str | None) -> Snapshot:
    spans = _Spans()
    reducers: dict[type, Any] = {**copyreg.dispatch_table, OrderedDict: _reduce_ordered_dict}
    reducers[types.MethodType] = unfit.reduce_method
    inspector_of = unfit.inspector_of(spans.add_array)
    scripts = torchscript.Scripts(archive)

    def meet(kind: type) -> unfit.Inspector | None:
        """Asked by the packer once per type, before pickle looks for a reducer. A class with a quirk is taken as its
        file in quirks/ says; what pickle would lose of it does not matter."""
        reducer = next(filter(None, (quirk.reducer(kind) for quirk in (*_QUIRKS, scripts))), None)
        if reducer is not None and reducers.setdefault(kind, reducer) is reducer:
            return None
        plain = nn_modules.reducer(kind)  # loses nothing that pickle keeps, keeps nothing that pickle loses
        if plain is not None:
            reducers.setdefault(kind, plain)
        return inspector_of(kind)

    packer = _backend(needs_torch=False).Packer(substitutes, meet)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=spans.add_buffer)
    pickler.dispatch_table = reducers
    pickler.persistent_id = packer.persistent_id  # type: ignore[method-assign]
    try:
        pickler.dump(result)
        tensors, storages, keepalive = packer.finish()
        scripts.refuse_shared(keepalive)
    except (unfit.Unfit, ValueError) as error:
        raise Unsupported(f"the result holds {error}") from None
    skeleton = file.getvalue()
    spans.refuse_overlaps(storages)
    buffers = storages + spans.buffers
    return Snapshot(
        skeleton=skeleton,
        tensors=tensors,
        buffers=buffers,
        keepalive=[*keepalive, *spans.keepalive],
        names=_names(skeleton),
        used=frozenset(substitutes[id(item)] for item in keepalive if id(item) in substitutes),
        nbytes=len(skeleton) + len(tensors) + sum(nbytes for _, nbytes in buffers),
    )


def _reduce_ordered_dict(mapping: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    """What OrderedDict.__reduce__ gives, without asking copyreg for its slots each time, which took half of
    take(): every module of torch has eleven of them, most of them empty."""
    state = mapping.__dict__
    if not mapping and not state:
        return OrderedDict, ()
    return OrderedDict, (), state or None, None, iter(mapping.items())


class _Spans:
    """Memory of pickle's own buffers, and of arrays that pickle copies. Two that overlap would come back apart."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int]] = []
        self.keepalive: list[Any] = []
        self._writable: list[tuple[int, int]] = []
        self._readonly: list[tuple[int, int]] = []

    def add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickler's buffer_callback: False takes the buffer out of the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # not contiguous: pickle's own way
        address, nbytes, readonly = _core.buffer_address(raw)
        if nbytes == 0:
            return True
        self.buffers.append((address, nbytes))
        self.keepalive.append(raw)
        (self._readonly if readonly else self._writable).append((address, nbytes))
        return False

    def add_array(self, array: Any) -> None:
        """A numpy array whose bytes pickle puts into the stream, or whose objects."""
        if type(array).__module__ == "numpy" and not array.dtype.hasobject:
            return  # add_buffer() sees it
        from numpy.lib.array_utils import byte_bounds

        low, high = byte_bounds(array)
        if high > low:
            self.keepalive.append(array)
            (self._writable if array.flags.writeable else self._readonly).append((low, high - low))

    def refuse_overlaps(self, storages: list[tuple[int, int]]) -> None:
        """Read-only memory may be kept twice: nobody can tell."""
        spans = [(*span, True) for span in storages + self._writable] + [(*span, False) for span in self._readonly]
        spans.sort()
        end, end_writable = 0, 0
        for address, nbytes, writable in spans:
            if address < (end if writable else end_writable):
                raise Unsupported("two arrays or storages in the result share memory, which pickle would not keep")
            end = max(end, address + nbytes)
            if writable:
                end_writable = max(end_writable, address + nbytes)


def _names(skeleton: bytes) -> frozenset[tuple[str, str]]:
    names = frozenset(_core.pickle_globals(skeleton))
    for module, name in names:
        if module in ("__main__", "__mp_main__"):
            raise Unsupported(f"the result refers to {name}, which is defined in the notebook or script itself")
    return names


def _backend(needs_torch: bool) -> Any:
    """overmind._torch, or torch_fallback when torch is not there or is another one than _torch was built against."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        if not needs_torch:
            return torch_fallback  # without torch there are no tensors to meet: don't import it for nothing
        torch = importlib.import_module("torch")
    try:
        from overmind import _torch
    except ImportError as error:
        _warn_of_fallback(str(error), torch.__version__)
        return torch_fallback
    if torch.__version__ == _torch.TORCH_VERSION:
        return _torch
    _warn_of_fallback(f"it was built for torch {_torch.TORCH_VERSION}", torch.__version__)
    return torch_fallback


def _warn_of_fallback(reason: str, version: str) -> None:
    log.warn_once(
        f"overmind._torch can't be used with torch {version} ({reason}); loads are correct but slower. "
        "To fix: pip install --no-build-isolation --force-reinstall overmind-jupyter"
    )


_HEADER = struct.Struct("<IIIIIIQ")  # RecordsHeader of kernel_ext/tensor_records.h


def _header(tensors: memoryview) -> tuple[int, int, int]:
    """(storages, index of the first buffer that is pickle's own, next hook id)"""
    if len(tensors) < _HEADER.size:
        raise ValueError("the tensor records of this entry are malformed: they end too early; drop the entry")
    _magic, storages, buffers, _items, _attributes, _reserved, next_hook_id = _HEADER.unpack_from(tensors)
    return storages, buffers, next_hook_id


def _keep_hook_ids_apart(next_hook_id: int) -> None:
    """Restored hooks keep their ids; a hook registered later must not get one of them and replace it."""
    from torch.utils.hooks import RemovableHandle

    RemovableHandle.next_id = max(RemovableHandle.next_id, next_hook_id)


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0]
