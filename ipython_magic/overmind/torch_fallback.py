# SPDX-License-Identifier: MIT
"""What overmind._torch does, in Python: for a torch that it was not built against, and for processes without torch.

Same names, same records (kernel_ext/tensor_records.h, to be changed together), same answers. Slower: a tensor takes
15 us, and a storage that must be resizable is copied out of the mapping, because Python has no way to give torch
such memory.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from overmind import _core

_MAGIC = 0x31544D4F
_HEADER = struct.Struct("<IIIIIIQ")
_STORAGE = struct.Struct("<QII")
_ITEM = struct.Struct("<BBBBIq")
_TENSOR, _PARAMETER, _UNTYPED, _TYPED, _SUBSTITUTE = range(5)
_REQUIRES_GRAD = 1

# In the order of c10::ScalarType; a torch that lacks one can't have written it.
_DTYPES = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "qint8",
    "quint8",
    "qint32",
    "bfloat16",
    "quint4x2",
    "quint2x4",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "uint16",
    "uint32",
    "uint64",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]

_SIMPLE = (bool, int, float, str, type(None))


class Packer:
    """As overmind._torch.Packer. Imports no torch: without one there are no tensors to meet."""

    def __init__(
        self, substitutes: dict[int, int], inspector_of: Callable[[type], Callable[[Any], object] | None] | None = None
    ) -> None:
        self._substitutes = substitutes
        self._inspector_of = inspector_of
        self._torch = sys.modules.get("torch")
        self._handlers: dict[type, Callable[[Any], int | None] | None] = {}
        self._ids: dict[int, int] = {}
        self._storages: list[tuple[int, bool]] = []
        self._storage_indices: dict[int, int] = {}
        self._buffers: list[tuple[int, int]] = []
        self._items: list[bytes] = []
        self._attributes: list[tuple[int, dict[str, Any]]] = []
        self._kept: list[Any] = []
        if self._torch is not None:
            self._ordinary = self._torch._C._dispatch_keys(self._torch.empty(0, device="cpu")).raw_repr()
            self._dtypes = {getattr(self._torch, name, None): number for number, name in enumerate(_DTYPES)}

    def persistent_id(self, obj: Any) -> int | None:
        number = self._substitutes.get(id(obj))
        if number is not None:
            known = self._ids.get(id(obj))
            return self._add(obj, _ITEM.pack(_SUBSTITUTE, 0, 0, 0, number, 0)) if known is None else known
        kind = type(obj)
        try:
            handler = self._handlers[kind]
        except KeyError:
            handler = self._handlers[kind] = self._handler(kind)
        return None if handler is None else handler(obj)

    def finish(self) -> tuple[bytes, list[tuple[int, int]], list[Any]]:
        attributes = pickle.dumps(self._attributes, 5) if self._attributes else b""
        header = _HEADER.pack(
            _MAGIC, len(self._storages), len(self._buffers), len(self._items), len(attributes), 0, _next_hook_id()
        )
        storages = b"".join(_STORAGE.pack(nbytes, resizable, 0) for nbytes, resizable in self._storages)
        return b"".join([header, storages, *self._items, attributes]), self._buffers, self._kept

    def _handler(self, kind: type) -> Callable[[Any], int | None] | None:
        self._kept.append(kind)
        torch = self._torch
        if torch is not None:
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                return self._tensor
            if kind is torch.UntypedStorage:
                return self._untyped_storage
            if kind is torch.storage.TypedStorage:
                return self._typed_storage
        inspect = None if self._inspector_of is None else self._inspector_of(kind)
        if torch is not None and issubclass(kind, torch.Tensor):
            return lambda tensor: self._inspected_tensor(inspect, tensor)
        if inspect is None:
            return None

        def handler(obj: Any) -> None:
            inspect(obj)

        return handler

    def _inspected_tensor(self, inspect: Callable[[Any], object] | None, tensor: Any) -> None:
        if inspect is not None:
            inspect(tensor)
        _refuse_lost_state(tensor)

    def _tensor(self, tensor: Any) -> int | None:
        known = self._ids.get(id(tensor))
        if known is not None:
            return known
        _refuse_lost_state(tensor)
        torch: Any = self._torch
        attributes = tensor.__dict__
        if torch._C._dispatch_keys(tensor).raw_repr() != self._ordinary or not all(
            type(name) is str and type(value) in _SIMPLE for name, value in attributes.items()
        ):
            return None
        index = self._storage_index(tensor.untyped_storage())
        if not _fits(tensor.storage_offset(), tensor.itemsize, self._storages[index][0], tensor.shape, tensor.stride()):
            raise ValueError(f"{_describe(tensor)} reaches beyond its storage")
        if attributes:
            self._attributes.append((len(self._items), attributes))
        kind = _TENSOR if type(tensor) is torch.Tensor else _PARAMETER
        flags = _REQUIRES_GRAD if tensor.requires_grad else 0
        record = _ITEM.pack(
            kind, self._dtypes[tensor.dtype], flags, tensor.dim(), index, tensor.storage_offset()
        ) + struct.pack(f"<{2 * tensor.dim()}q", *tensor.shape, *tensor.stride())
        return self._add(tensor, record)

    def _untyped_storage(self, storage: Any) -> int:
        return self._storage(storage, storage, _UNTYPED, 0)

    def _typed_storage(self, storage: Any) -> int:
        return self._storage(storage, storage._untyped_storage, _TYPED, self._dtypes[storage.dtype])

    def _storage(self, obj: Any, untyped: Any, kind: int, dtype: int) -> int:
        known = self._ids.get(id(obj))
        if known is not None:
            return known
        if untyped.device.type != "cpu":
            raise ValueError(f"a storage on {untyped.device}, not on the CPU")
        return self._add(obj, _ITEM.pack(kind, dtype, 0, 0, self._storage_index(untyped), 0))

    def _storage_index(self, storage: Any) -> int:
        known = self._storage_indices.get(storage._cdata)
        if known is not None:
            return known
        if storage.is_shared():
            raise ValueError("a tensor whose memory is shared with other processes")
        nbytes, address = storage.nbytes(), storage.data_ptr()
        if nbytes and not address:
            raise ValueError(f"a storage of {nbytes} bytes without memory")
        cuda = getattr(self._torch, "cuda", None)
        if nbytes and cuda is not None and cuda.is_initialized() and storage.is_pinned():
            raise ValueError("a tensor in pinned memory")
        index = self._storage_indices[storage._cdata] = len(self._storages)
        self._storages.append((nbytes, storage.resizable()))
        self._kept.append(storage)
        if nbytes:
            self._buffers.append((address, nbytes))
        return index

    def _add(self, obj: Any, record: bytes) -> int:
        number = self._ids[id(obj)] = len(self._items)
        self._items.append(record)
        self._kept.append(obj)
        return number


def build(segment: _core.Segment, substitutes: list[Any]) -> list[Any]:
    """As overmind._torch.build, but takes the Segment itself. Imports torch when there are tensors."""
    return list(_Builder(segment, substitutes).items())


class _Builder:
    def __init__(self, segment: _core.Segment, substitutes: list[Any]) -> None:
        self._segment = segment
        self._substitutes = substitutes
        self._records = segment.tensors
        self._at = _HEADER.size
        self._storages: list[Any] = []

    def items(self) -> Iterator[Any]:
        if len(self._records) < _HEADER.size:
            raise _malformed("they end too early")
        magic, storages, _buffers, items, attributes_size, _reserved, _next = _HEADER.unpack_from(self._records)
        if magic != _MAGIC:
            raise _malformed("not such records")
        try:
            self._make_storages(storages)
            made = [self._item() for _ in range(items)]
        except struct.error:
            raise _malformed("they end too early") from None
        if attributes_size:
            for index, values in pickle.loads(self._records[self._at : self._at + attributes_size]):
                made[index].__dict__.update(values)
        yield from made

    def _take(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._records, self._at)
        self._at += form.size
        return values

    def _make_storages(self, count: int) -> None:
        buffer = 0
        for _ in range(count):
            nbytes, resizable, _reserved = self._take(_STORAGE)
            if nbytes and (buffer >= self._segment.buffer_count or len(self._segment.buffer(buffer)) != nbytes):
                raise _malformed("a storage and its buffer differ in size")
            self._storages.append(
                _storage_over(self._segment.buffer(buffer), resizable) if nbytes else _empty(resizable)
            )
            buffer += bool(nbytes)

    def _item(self) -> Any:
        kind, dtype, flags, ndim, index, offset = self._take(_ITEM)
        if kind > _SUBSTITUTE or index >= len(self._substitutes if kind == _SUBSTITUTE else self._storages):
            raise _malformed("unknown kind of item, storage or substitute")
        if kind == _SUBSTITUTE:
            return self._substitutes[index]
        if kind == _UNTYPED:
            return self._storages[index]
        import torch

        if dtype >= len(_DTYPES) or not hasattr(torch, _DTYPES[dtype]):
            raise _malformed("unknown dtype")
        torch_dtype = getattr(torch, _DTYPES[dtype])
        if kind == _TYPED:
            return torch.storage.TypedStorage(wrap_storage=self._storages[index], dtype=torch_dtype, _internal=True)
        shape = self._take(struct.Struct(f"<{2 * ndim}q"))
        tensor = torch.empty(0, dtype=torch_dtype, device="cpu")
        storage = self._storages[index]
        # set_() would resize a storage that is too small, and give bytes that nobody stored.
        if not _fits(offset, torch_dtype.itemsize, storage.nbytes(), shape[:ndim], shape[ndim:]):
            raise _malformed("a tensor leaves its storage")
        tensor.set_(storage, offset, shape[:ndim], shape[ndim:])
        if kind == _PARAMETER:
            return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, bool(flags & _REQUIRES_GRAD))
        return tensor.requires_grad_() if flags & _REQUIRES_GRAD else tensor


def _storage_over(view: memoryview, resizable: int) -> Any:
    import torch

    # The storage holds the memoryview, and the memoryview the mapping, until the last tensor is gone.
    storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    return torch.UntypedStorage(len(view), device="cpu").copy_(storage) if resizable else storage


def _empty(resizable: int) -> Any:
    import torch

    return torch.UntypedStorage(0, device="cpu") if resizable else torch.UntypedStorage(1, device="cpu")[0:0]


def _malformed(what: str) -> ValueError:
    return ValueError(f"the tensor records of this entry are malformed: {what}; drop the entry")


def _next_hook_id() -> int:
    hooks = sys.modules.get("torch.utils.hooks")
    return 0 if hooks is None else int(hooks.RemovableHandle.next_id)


def _describe(tensor: Any) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _refuse_lost_state(tensor: Any) -> None:
    if tensor.is_inference():
        raise ValueError("a tensor made in inference mode")
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise ValueError(f"{_describe(tensor)} has hooks, which pickle drops")
    if tensor.grad_fn is not None:
        raise ValueError(f"{_describe(tensor)} is the result of a computation that autograd recorded")
    if tensor.grad is not None:
        raise ValueError(f"{_describe(tensor)} has a gradient")
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(f"{_describe(tensor)} is on {tensor.device}, not on the CPU")


def _fits(offset: int, itemsize: int, nbytes: int, shape: Sequence[int], strides: Sequence[int]) -> bool:
    if offset < 0 or any(number < 0 for number in (*shape, *strides)):
        return False
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    return 0 in shape or (last + 1) * itemsize <= nbytes
