# SPDX-License-Identifier: MIT
"""The caller's own objects inside a result: how they are found in a call, and again in another one.

`pipe.vae is vae` must hold on a hit as it does natively. On a miss every mutable object of the arguments gets a
number; where the result refers to one, the skeleton holds the number. On a hit the numbers stand for the objects at
the same places of the new call. Calls with equal keys have the same shape and the same aliases (encoding.py), so
a place of one is a place of the other.
"""

from __future__ import annotations

import bisect
import enum
import hashlib
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from overmind import encoding, quirks
from overmind.encoding import Node, Uncacheable

_TABLES = ("_modules", "_parameters", "_buffers")


class Arguments:
    """The mutable objects of one call. Keeps them alive; never changes them. Not thread-safe."""

    def __init__(self, arguments: dict[str, Any], nodes: Sequence[Node]) -> None:
        self._arguments = arguments
        self._nodes = nodes
        self._trees: dict[int, tuple[list[Any], str]] = {}  # of substitutes(), for paths(): 1 ms for each UNet

    def substitutes(self) -> tuple[dict[int, int], list[Any]]:
        """id(object) -> number, and the objects in the order of their numbers.

        Uncacheable if one argument is part of another: which of the two a result meant can't be told.
        """
        objects = [node.value for node in self._nodes]
        numbers = {id(value): number for number, value in enumerate(objects)}
        for tree in self._nodes:
            if not tree.tree:
                continue
            found = self._trees[id(tree.value)] = _parts(tree.value)
            for part in found[0]:
                number = numbers.setdefault(id(part), len(objects))
                if number < len(objects) and not _is_below(tree, number, self._nodes):
                    raise Uncacheable("one argument is a part of another one, or shares a part with it")
                objects.append(part)
        return numbers, objects

    def paths(self, used: Collection[int] | None = None) -> list[Any]:
        """Where resolve() finds the same objects in another call: JSON, in the order of substitutes().

        With `used`, up to the highest of these numbers only: walking the parts of a UNet to find none takes 3 ms a hit.
        """
        count = len(self._nodes) if used is None else max(used, default=-1) + 1
        found: list[Any] = [_steps(node) for node in self._nodes[:count]]
        if used is not None and count <= len(self._nodes):
            return found
        for node in self._nodes:
            if node.tree:
                parts, shape = self._trees.get(id(node.value)) or _parts(node.value)
                found.append(["tree", len(parts), shape, _steps(node)])
        return found

    def resolve(self, paths: list[Any]) -> list[Any]:
        """This call's objects at `paths`, in order. LookupError if one has no such place."""
        try:
            return self._resolve(paths)
        except (TypeError, AttributeError) as error:
            raise LookupError(f"an argument is not what it was in the call that was cached ({error})") from None

    def _resolve(self, paths: list[Any]) -> list[Any]:
        found: list[Any] = []
        for path in paths:
            if path and path[0] == "tree":
                _name, count, shape, steps = path
                parts, own_shape = _parts(self._walk(steps))
                if len(parts) != count or own_shape != shape:
                    raise LookupError("the parts of an argument differ from those of the call that was cached")
                found.extend(parts)
            else:
                found.append(self._walk(path))
        return found

    def _walk(self, steps: list[Any]) -> Any:
        value: Any = self._arguments
        position = 0
        while position < len(steps):
            value = _step(value, steps[position], steps[position + 1])
            position += 2
        return value


def shares(objects: Sequence[Any], buffers: Sequence[tuple[int, int]]) -> bool:
    """True if any (address, nbytes) of a result lies in memory of a tensor or array among substitutes()' objects.

    Such a result is a view of the caller's data natively, and would be a copy on a hit.
    """
    torch, numpy = encoding.loaded("torch"), encoding.loaded("numpy")
    spans = sorted(span for value in objects for span in _memory(value, torch, numpy))
    starts = [start for start, _ in spans]
    # The furthest end of a span and all before it: one look answers for all that begin early enough.
    ends = list(itertools.accumulate((start + length for start, length in spans), max))
    for address, nbytes in buffers:
        before = bisect.bisect_left(starts, address + nbytes)
        if nbytes and before and ends[before - 1] > address:
            return True
    return False


def _steps(node: Node) -> list[Any]:
    """Flat: kind, name, kind, name, ..."""
    chain: list[list[Any]] = []
    current: Node | None = node
    while current is not None:
        chain.append(current.step)
        current = current.parent
    return [part for step in reversed(chain) for part in step]


def _step(value: Any, kind: str, name: Any) -> Any:
    if kind == "a":
        return value[name]
    if kind == "i":
        return tuple.__getitem__(value, name) if isinstance(value, tuple) else list.__getitem__(value, name)
    if kind in ("k", "v"):
        return list(dict.keys(value) if kind == "k" else dict.values(value))[name]
    if kind == "t":
        return encoding.state(value)[name]
    if kind == "x":
        return value.default_factory
    if kind == "g":
        return getattr(value, name)
    raise LookupError(f"no step of kind {kind!r}")


def _parts(root: Any) -> tuple[list[Any], str]:
    """Submodules, parameters, buffers and the opaque attributes of an object, and a digest of their names.

    The digest says under which names one object is found, so that ties are part of it. About 1 us a part: a pipeline's
    hit does this for each of its modules.
    """
    parts: list[Any] = []
    numbers: dict[int, int] = {id(root): -1}
    lines: list[str] = []
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        prefix, owner = stack.pop()
        state = object.__getattribute__(owner, "__dict__")
        quirks.complete(owner, state)
        if "_parameters" not in state:
            _opaque_parts(state, parts, numbers, lines)
            continue
        for table in _TABLES:
            for name, part in state[table].items():
                if part is None:
                    continue
                path = f"{prefix}.{name}"
                number = numbers.get(id(part))
                if number is None:
                    number = numbers[id(part)] = len(parts)
                    parts.append(part)
                    if table == "_modules":
                        stack.append((path, part))
                lines.append(f"{table}{path}={number};{type(part).__qualname__}")
    return parts, hashlib.sha1("\n".join(lines).encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def _opaque_parts(state: dict[str, Any], parts: list[Any], numbers: dict[int, int], lines: list[str]) -> None:
    """Attributes of a tokenizer or processor, one level deep (its Rust tokenizer, its vocabulary)."""
    for name, part in sorted(state.items()):
        if not _is_own(part):
            continue
        if id(part) not in numbers:
            numbers[id(part)] = len(parts)
            parts.append(part)
        lines.append(f"{name}={numbers[id(part)]};{type(part).__qualname__}")


def _is_own(part: Any) -> bool:
    """An object that only its owner holds: no enum member, dtype or other value that stands for itself everywhere."""
    if isinstance(part, (list, dict, set, bytearray)):
        return True
    library = type(part).__module__.partition(".")[0]
    return library in ("tokenizers", "transformers", "sentencepiece") and not isinstance(part, (enum.Enum, type))


def _is_below(tree: Node, number: int, nodes: Sequence[Node]) -> bool:
    """True if object `number` was met inside `tree` (its config, say), and not as an argument beside it."""
    current: Node | None = nodes[number] if number < len(nodes) else None
    while current is not None and current is not tree:
        current = current.parent
    return current is tree


def _memory(value: Any, torch: Any, numpy: Any) -> list[tuple[int, int]]:
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            storage = value.untyped_storage()
            nbytes = storage.nbytes()
            return [(storage.data_ptr(), nbytes)] if nbytes else []
        except (RuntimeError, NotImplementedError):
            return []  # no memory of its own: meta, sparse, a wrapper
    if numpy is not None and type(value) is numpy.ndarray:
        return [(value.ctypes.data, value.nbytes)] if value.nbytes else []
    return []
