# SPDX-License-Identifier: MIT
"""A full description of a loaded object, as JSON values: equal descriptions, equal objects.

Covers class, module structure, names, shape, dtype, stride, offset, bytes, storage size, resizability and sharing,
`requires_grad`, version of a leaf, training flag, hooks, attributes of tensors and modules, configs. Used on both
sides of every parity test.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any


def describe(obj: Any) -> Any:
    """Deterministic across processes: no ids, no addresses."""
    return _Describer().visit(obj)


class _Describer:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._keep: list[Any] = []

    def visit(self, obj: Any) -> Any:
        import torch

        if obj is None or isinstance(obj, (bool, int, str)):
            return obj if type(obj) in (type(None), bool, int, str) else [self._class(obj), str(obj)]
        if isinstance(obj, float):
            return ["float", obj.hex()]
        if isinstance(obj, (torch.dtype, torch.device)):
            return repr(obj)
        if isinstance(obj, type) or (callable(obj) and hasattr(obj, "__qualname__")):
            return ["code", f"{obj.__module__}.{obj.__qualname__}"]
        if id(obj) in self._seen:
            return ["again", self._seen[id(obj)]]
        self._seen[id(obj)] = len(self._seen)
        self._keep.append(obj)
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, (list, tuple)):
            return [self._class(obj), [self.visit(item) for item in obj]]
        if isinstance(obj, (set, frozenset)):
            return [self._class(obj), sorted(str(self.visit(item)) for item in obj)]
        if isinstance(obj, Mapping):
            own = {k: v for k, v in vars(obj).items()} if hasattr(obj, "__dict__") else {}
            return [self._class(obj), [[self.visit(k), self.visit(v)] for k, v in obj.items()], self._vars(own)]
        return self._other(obj)

    def _other(self, obj: Any) -> Any:
        import numpy as np

        if isinstance(obj, bytes):
            return ["bytes", _digest(obj)]
        if isinstance(obj, np.ndarray):
            return [
                "array",
                str(obj.dtype),
                list(obj.shape),
                list(obj.strides),
                obj.flags.writeable,
                _digest(obj.tobytes()),
            ]
        backend = getattr(obj, "_tokenizer", None)
        if backend is not None and hasattr(backend, "to_str"):
            own = {k: v for k, v in vars(obj).items() if k != "_tokenizer"}
            return [self._class(obj), _digest(backend.to_str().encode()), self._vars(own)]
        if hasattr(obj, "to_str") and type(obj).__module__.startswith("tokenizers"):
            return [self._class(obj), _digest(obj.to_str().encode())]
        if isinstance(obj, weakref.ref):
            return [self._class(obj), self.visit(obj())]
        if hasattr(obj, "serialized_model_proto"):  # sentencepiece: its only attribute is an address
            return [self._class(obj), _digest(obj.serialized_model_proto())]
        if hasattr(obj, "__dict__"):
            return [self._class(obj), self._vars(vars(obj))]
        if hasattr(obj, "value"):
            return [self._class(obj), str(obj)]
        return [self._class(obj), repr(obj)]

    def _vars(self, own: dict[str, Any]) -> list[Any]:
        return [[name, self.visit(value)] for name, value in sorted(own.items(), key=lambda item: str(item[0]))]

    @staticmethod
    def _class(obj: Any) -> str:
        return f"{type(obj).__module__}.{type(obj).__qualname__}"

    def _tensor(self, tensor: Any) -> Any:
        import torch

        facts: list[Any] = [
            self._class(tensor),
            str(tensor.dtype),
            list(tensor.shape),
            str(tensor.device),
            str(tensor.layout),
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.is_inference(),
            self.visit(tensor.grad) if tensor.is_leaf else None,
            self._vars(dict(vars(tensor))),
        ]
        if tensor.is_quantized:
            return [*facts, str(tensor.qscheme()), _bytes(tensor.int_repr())]
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return [*facts, repr(tensor)]
        storage = tensor.untyped_storage()
        self._keep.append(storage)
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        return [
            *facts,
            list(tensor.stride()),
            tensor.storage_offset(),
            ["storage", number, storage.nbytes(), storage.resizable()],
            [tensor.is_conj(), tensor.is_neg()],
            bool(tensor._backward_hooks),  # unpickling leaves an empty table, which is as good as none
            _bytes(tensor),
        ]


def _bytes(tensor: Any) -> str:
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _digest(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else "empty"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def folder_bytes(path: str) -> dict[str, str]:
    """Every file below a folder and a digest of its bytes: what `save_pretrained` wrote."""
    import os

    found = {}
    for base, _folders, files in os.walk(path):
        for name in files:
            full = os.path.join(base, name)
            with open(full, "rb") as file:
                found[os.path.relpath(full, path)] = _digest(file.read())
    return dict(sorted(found.items()))
