# SPDX-License-Identifier: MIT
"""A live nn.Module as part of a key: everything that Python code can see of it but the numbers in its parameters."""

from __future__ import annotations

import ctypes
import hashlib
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from overmind import encoding, quirks
from overmind.encoding import Encoder, Node

_MOST = 2_000_000  # nodes; a traced SDXL UNet has about 100,000
_CONFIG = ("diffusers.configuration_utils", "FrozenDict")  # what it holds is in its attributes too
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was not written in C (with few exceptions)


class Facts(Encoder):
    """Encodes modules, and tensors by their form. `tensors` are those met, in an order that only the module decides.

    `is_wrapper(name, value)`: an attribute to be named only. Not thread-safe.
    """

    def __init__(self, is_wrapper: Callable[[str, Any], bool] = lambda _name, _value: False) -> None:
        super().__init__()
        self._budget = _MOST
        self._quiet = 1
        self._is_wrapper = is_wrapper
        self._storages: dict[int, int] = {}
        self.tensors: list[Any] = []
        self.parameters: list[Any] = []
        self.kinds: dict[Any, None] = {}  # classes and functions, as they were met

    def reference(self, value: Any) -> None:
        super().reference(value)
        self.kinds[value] = None

    def value(self, value: Any, parent: Node | None, step: list[Any]) -> None:
        torch = encoding.loaded("torch")
        if isinstance(value, torch.nn.Module):
            self._module(value, parent, step)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, parent, step)
        elif (type(value).__module__, type(value).__qualname__) == _CONFIG:
            self._config(value, parent, step)
        elif encoding._handler_of(value) is encoding._unknown and _is_plain(type(value)):
            encoding._content(self, value, parent, step)
        else:
            super().value(value, parent, step)

    def fingerprint(self, contents: list[Any]) -> bytes:
        """SHA-256 of what was encoded and of the bytes of these tensors."""
        digest = hashlib.sha256(b"".join(self.parts))
        for tensor in contents:
            plain = tensor.detach().contiguous()
            nbytes = plain.numel() * plain.element_size()
            digest.update((ctypes.c_char * nbytes).from_address(plain.data_ptr()) if nbytes else b"")
        return digest.digest()

    def _module(self, value: Any, parent: Node | None, step: list[Any]) -> None:
        node = self.node(value, parent, step)
        if node is None:
            return
        quirks.complete(value, object.__getattribute__(value, "__dict__"))
        self.parts.append(b"W")
        self.reference(type(value))
        own = sorted((name, part) for name, part in encoding.state(value).items() if not _is_empty_table(part))
        self.parts.append(b"%d:" % len(own))
        for name, part in own:
            self.text(name)
            if self._is_wrapper(name, part):
                self.parts.append(b"w")
            elif name == "_parameters":
                self._table(part, node, self.parameters)
            elif name == "_modules":
                self._table(part, node, None)
            else:
                self.value(part, node, ["t", name])

    def _table(self, table: dict[str, Any], node: Node, list_of: list[Any] | None) -> None:
        """Not by items(): modules are nested more deeply than arguments are."""
        self.parts.append(b"%d:" % len(table))
        for name, part in table.items():
            self.text(name)
            if list_of is not None and part is not None:
                list_of.append(part)
            self.value(part, node, ["t", name])

    def _config(self, value: Any, parent: Node | None, step: list[Any]) -> None:
        """By name: diffusers makes it from a set of names, in another order in each process."""
        if self.node(value, parent, step) is None:
            return
        self.parts.append(b"G")
        self.reference(type(value))
        items = {name: set(part) if name == "_use_default_values" else part for name, part in dict.items(value)}
        self.value(sorted(items.items()), None, [])

    def _tensor(self, value: Any, parent: Node | None, step: list[Any]) -> None:
        torch = encoding.loaded("torch")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise self.refuse(value)
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise self.refuse(value, "is or holds a tensor that is not a plain one on the CPU")
        if value.is_conj() or value.is_neg() or value.grad_fn is not None or value._backward_hooks:
            raise self.refuse(value, "is or holds a tensor that is part of a computation")
        node = self.node(value, parent, step)
        if node is None:
            return
        self.tensors.append(value)
        storage = self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))
        self.parts.append(b"V")
        self.text(
            f"{type(value).__name__} {value.dtype} {list(value.shape)} {list(value.stride())} {value.storage_offset()} "
            f"{value.requires_grad} {value.is_inference()} {storage}"
        )
        self.attributes(value, node)


def _is_plain(kind: type) -> bool:
    """A class written in Python all the way down: its objects have nothing but attributes."""
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__) and not issubclass(
        kind, types.ModuleType
    )


def _is_empty_table(part: Any) -> bool:
    """Ten of the eleven tables of most modules."""
    return type(part) in (OrderedDict, dict, set) and not part
