# SPDX-License-Identifier: MIT
"""Whether a trace depends on the values of its inputs.

Python code that reads a tensor while it is traced (`if x.sum() > 0`, `int(n)`) puts what it read, or what it did
because of it, into the trace for good. A size that is read that way belongs to the signature of the inputs; a value
does not, and a trace with such a read is no use for other values. torch warns of each read but does not say of
which tensor, and a function mode does not see what Python code of torch itself reads. So for the time of a trace
the reading methods of torch.Tensor are wrapped, and what is read is followed back through the graph.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from overmind.quirks import torchscript

_METHODS = (
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__dlpack__", "item", "tolist", "numpy",
    "is_nonzero", "equal", "allclose", "data_ptr", "untyped_storage", "storage",
)  # fmt: skip
_KIND = re.compile(r"= (\w+::\w+)")
_FUNCTIONS = ("is_nonzero", "equal", "allclose")
_ABSENT = object()

_lock = threading.Lock()
_local = threading.local()
_watching = 0
_replaced: list[tuple[Any, str, Any, Any]] = []


class Reads:
    """What one trace, on the thread that began watching, has read. `values`: which flat inputs are the user's
    tensors; those that carry structure are read always, and are equal for equal signatures."""

    def __init__(self, values: list[bool]) -> None:
        self.refusal: str | None = None
        self._values = values
        self._tracing: Any = None
        self._clear: set[int] = set()  # values of that trace's graph known to come from sizes alone

    def note(self, parts: list[Any]) -> None:
        """A read of the tensors among `parts`. Raises nothing: it happens in the middle of the user's code.

        torch names what it traces after local variables that hold it; none does here.
        """
        import torch

        if self.refusal is not None or not torch.jit.is_tracing():
            return
        numbers = [number for number, kind in enumerate(map(type, parts)) if issubclass(kind, torch.Tensor)]
        tracing = torch._C._get_tracing_state()
        if tracing is not self._tracing:
            self._tracing, self._clear = tracing, set()
        try:
            if any(self._of_value(torch._C._get_value_trace(parts[number])) for number in numbers):
                self.refusal = "a trace that depends on the values of its inputs or weights, which its code reads"
        except Exception as error:
            self.refusal = f"a trace that read what could not be followed ({error})"

    def _of_value(self, value: Any) -> bool:
        """Whether `value` was computed from the elements of an input or a weight, and not from sizes alone."""
        seen: set[int] = set()
        stack = [value]
        while stack:
            value = stack.pop()
            if value.unique() in seen or value.unique() in self._clear:
                continue
            seen.add(value.unique())
            node = value.node()
            kind = node.kind()
            if kind in ("prim::TracedAttr", "prim::GetAttr"):
                return True
            if kind == "prim::Param":
                names = [output.debugName() for output in node.outputs()][-len(self._values) :]
                if value.debugName() not in names or self._values[names.index(value.debugName())]:
                    return True
            elif kind not in ("aten::size", "aten::dim", "aten::numel"):
                stack += node.inputs()
        self._clear |= seen
        return False


@contextmanager
def watched(reads: Reads) -> Iterator[None]:
    """Notes every read of this thread. Other threads pass."""
    _install()
    _local.reads = reads
    try:
        yield
    finally:
        _local.reads = None
        _remove()


def dynamic(traced: Any) -> bool:
    """Whether a trace has an operator whose output's size depends on values: that size may have been read. Its parts
    are looked at first, which may say yes where the whole knows better: to inline a UNet's graph takes 0.16 s."""
    return any(map(_has_dynamic, _graphs(traced._c))) and _has_dynamic(traced.inlined_graph)


def _graphs(compiled: Any) -> Iterator[Any]:
    from torch._C import ModuleDict

    yield from (compiled._get_method(name).graph for name in compiled._method_names())
    for _name, part in torchscript.items(ModuleDict(compiled)):
        yield from _graphs(part)


def _has_dynamic(graph: Any) -> bool:
    """The graph's text names the kinds of its nodes, in blocks as well: to ask each node of a UNet takes 0.13 s, this
    0.02. What else looks like a kind there does no harm."""
    kinds = filter(_may_be_dynamic, set(_KIND.findall(str(graph))))
    return any(_is_dynamic(node) for kind in kinds for node in graph.findAllNodes(kind))


def _may_be_dynamic(kind: str) -> bool:
    return kind == "aten::index" or _has_dynamic_overload(kind)


def _is_dynamic(node: Any) -> bool:
    if node.kind() != "aten::index":
        return True
    indices = list(node.inputs())[1].node()
    return indices.kind() != "prim::ListConstruct" or not all(_keeps_sizes(index.type()) for index in indices.inputs())


def _keeps_sizes(kind: Any) -> bool:
    """Whether an index of this type gives as many elements as it has itself: a mask does not. The text of a type
    says nothing of its elements."""
    if kind.kind() == "TensorType":
        return kind.scalarType() in ("Int", "Long")
    return bool(kind.kind() == "NoneType")


@functools.cache
def _has_dynamic_overload(kind: str) -> bool:
    import torch

    library, _, name = kind.partition("::")
    packet = getattr(torch.ops.aten, name, None) if library == "aten" else None
    if packet is None:
        return library not in ("prim", "aten")
    tags = [tag for overload in packet.overloads() for tag in getattr(packet, overload).tags]
    return torch.Tag.dynamic_output_shape in tags


def _install() -> None:
    global _watching
    import torch

    with _lock:
        _watching += 1
        if _watching > 1:
            return
        for owner, names in ((torch.Tensor, _METHODS), (torch, _FUNCTIONS)):
            for name in names:
                old = vars(owner).get(name, _ABSENT)
                new = _wrapper(getattr(owner, name))
                setattr(owner, name, new)
                _replaced.append((owner, name, old, new))


def _remove() -> None:
    global _watching
    with _lock:
        _watching -= 1
        if _watching:
            return
        while _replaced:
            owner, name, old, new = _replaced.pop()
            if vars(owner).get(name) is not new:
                continue  # somebody else's by now; ours below it only passes on
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _wrapper(native: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        reads = getattr(_local, "reads", None)
        if reads is not None:
            reads.note([*args, *kwargs.values()])
        return native(*args, **kwargs)

    functools.update_wrapper(read, native)
    return read
