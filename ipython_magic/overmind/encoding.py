# SPDX-License-Identifier: MIT
"""Python values as bytes: equal bytes only for values that a loader can't tell apart.

Every value is a tag, then a length or a count, then its parts, so no two values share their bytes (1, True, 1.0 and
"1" differ). A mutable object that is met again becomes a back reference, so the pattern of aliases is part of the
bytes and cycles end. What isn't known here is refused: nothing is compared by identity, printed or hashed, and no
code of an unknown class runs.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import os
import pathlib
import struct
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from overmind import modules

MAX_DEPTH = 40
MAX_NODES = 50_000  # about 40 ms of encoding; a load with more than that in its arguments can as well be native
MAX_PROBES = 64  # strings looked up as paths; beyond that the working directory is part of the key instead
MAX_ARRAY = 1 << 16  # bytes of one tensor or array that are hashed

PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)
_SCALARS = (bool, int, float, str, type(None), bytes)


class Uncacheable(Exception):  # noqa: N818
    """This call can't be cached; str() is the reason, for the user to read."""


class Node:
    """A mutable object met in the arguments, and the step that leads to it from its parent."""

    __slots__ = ("parent", "step", "tree", "value")

    def __init__(self, value: Any, parent: Node | None, step: list[Any], tree: bool = False) -> None:
        self.value = value
        self.parent = parent
        self.step = step
        self.tree = tree  # its parts are objects too, found only when somebody asks (substitution.py)


class Encoder:
    """Encodes the arguments of one call. Not thread-safe; keeps the mutable objects that it has met alive.

    `embeds`: nn.Modules, tokenizers and processors are taken by their facts, without their weights.
    `filled`: a dict that the call fills in; what it holds is left out.
    """

    def __init__(self, embeds: bool = False, filled: dict[Any, Any] | None = None) -> None:
        self.parts: list[bytes] = []
        self.marks: list[tuple[str, int]] = []  # each argument, and where its parts begin
        self.nodes: list[Node] = []
        self.code: set[str] = set()  # modules outside site-packages whose classes or functions were met
        self.packages: set[str] = set()  # installed packages whose classes or functions were met
        self.paths: dict[str, None] = {}  # strings that may name files, in the order met
        self.too_many_paths = False
        self.embeds = embeds
        self.filled = filled
        self._numbers: dict[int, int] = {}
        self._depth = 0
        self._budget = MAX_NODES
        self._quiet = 0  # inside a library's own object: its strings are not looked up as paths
        self._frozen = False  # inside a set: only immutable parts
        self._where = ""

    def argument(self, name: str, value: Any) -> None:
        """One argument; `name` is said in the reason if it is refused."""
        self._where = name
        parts = self.parts
        self.marks.append((name, len(parts)))
        head = _heads.get(name)
        if head is None:
            head = _head(name)
        parts.append(head)
        if value is None:
            parts.append(b"n")
        elif value is False or value is True:
            parts.append(b"T" if value else b"F")
        else:
            self.value(value, None, ["a", name])

    def difference(self, before: Encoder) -> str | None:
        """The first argument whose value, or whose mutable objects, differ from `before`; None if none does."""
        own, other = self._pieces(), before._pieces()
        for name in [*other, *own]:
            if own.get(name) != other.get(name):
                return name
        return None

    def _pieces(self) -> dict[str, tuple[bytes, list[int]]]:
        ends = [start for _name, start in self.marks] + [len(self.parts)]
        pieces: dict[str, tuple[bytes, list[int]]] = {}
        for (name, start), end in zip(self.marks, ends[1:], strict=True):
            pieces[name] = (b"".join(self.parts[start:end]), [])
        for node in self.nodes:
            top = node
            while top.parent is not None:
                top = top.parent
            pieces[top.step[1]][1].append(id(node.value))
        return pieces

    def text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.parts.append(b"s%d:" % len(data))
        self.parts.append(data)

    def raw(self, tag: bytes, data: bytes) -> None:
        self.parts.append(b"%b%d:" % (tag, len(data)))
        self.parts.append(data)

    def refuse(self, value: Any, why: str = "") -> Uncacheable:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        return Uncacheable(
            f"argument {self._where!r} {why or f'is or holds a {name}, which Overmind does not compare'}"
        )

    def value(self, value: Any, parent: Node | None, step: list[Any]) -> None:
        handler = _BY_TYPE.get(id(type(value)))
        if handler is None:
            handler = _handler_of(value)
        handler(self, value, parent, step)

    def _enter(self, value: Any, parts: int) -> None:
        """Before the parts of a container, so that neither depth nor size runs away."""
        self._budget -= parts + 1
        self._depth += 1
        if self._budget < 0:
            raise self.refuse(value, "has too many parts to compare")
        if self._depth > MAX_DEPTH:
            raise self.refuse(value, "is nested too deeply to compare")

    def node(self, value: Any, parent: Node | None, step: list[Any], tree: bool = False) -> Node | None:
        """Registers a mutable object. None: it was met before, and a back reference was written."""
        if self._frozen:
            raise self.refuse(value, "holds a set with mutable parts")
        known = self._numbers.get(id(value))
        if known is not None:
            self.parts.append(b"@%d;" % known)
            return None
        self._numbers[id(value)] = len(self.nodes)
        node = Node(value, parent, step, tree)
        self.nodes.append(node)
        return node

    def reference(self, value: Any) -> None:
        """A class or function by its name, if its name leads to it."""
        module = modules.home(value)
        if module is None:
            name = getattr(value, "__qualname__", "?")
            raise self.refuse(
                value, f"holds {name}, which can't be imported by name (a notebook's own, local or changed)"
            )
        self.parts.append(b"c")
        self.text(module)
        self.text(value.__qualname__)
        if modules.installed(module):
            self.packages.add(module.partition(".")[0])
        else:
            self.code.add(module)

    def items(self, mapping: dict[Any, Any], parent: Node | None) -> None:
        """The items in their order; `parent` owns them."""
        self._enter(mapping, len(mapping))
        self.parts.append(b"%d:" % len(mapping))
        for index, (key, value) in enumerate(dict.items(mapping)):
            self.value(key, parent, ["k", index])
            self.value(value, parent, ["v", index])
        self._depth -= 1

    def sequence(self, values: Iterable[Any], count: int, parent: Node | None, step: Sequence[Any] = ()) -> None:
        """The items of a list, or of a tuple: that is no node, and its own `step` is part of those of its items."""
        self._enter(values, count)
        self.parts.append(b"%d:" % count)
        for index, value in enumerate(values):
            self.value(value, parent, [*step, "i", index])
        self._depth -= 1

    def attributes(self, value: Any, node: Node | None) -> None:
        """Everything in the object's __dict__ and slots, whatever its class makes of it.

        By name, not by age: an unpickled object sets its attributes in another order than its constructor.
        """
        own = state(value)
        self._enter(value, len(own))
        self.parts.append(b"%d:" % len(own))
        for name, part in sorted(own.items()):
            self.text(name)
            self.value(part, node, ["t", name])
        self._depth -= 1

    def quietly(self, write: Callable[[], None]) -> None:
        self._quiet += 1
        try:
            write()
        finally:
            self._quiet -= 1

    def path(self, text: str) -> None:
        """Notes a string that may name a file or folder."""
        if self._quiet or not text or len(text) > 4096 or "\0" in text:
            return
        if len(self.paths) >= MAX_PROBES:
            self.too_many_paths = True
        else:
            self.paths[text] = None


def state(value: Any) -> dict[str, Any]:
    """The object's attributes by name, without running any of its code."""
    found: dict[str, Any] = {}
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = None
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            member = cls.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(value, cls)
                except AttributeError:
                    continue  # a slot that was never set: its name is not in the count, which says so
    if type(own) is dict:
        found.update({name: part for name, part in own.items() if type(name) is str})
    return found


_heads: dict[str, bytes] = {}  # names of parameters, encoded


def _head(name: str) -> bytes:
    data = name.encode("utf-8", "surrogatepass")
    head = b"s%d:%b" % (len(data), data)
    if len(_heads) < 4096:
        _heads[name] = head
    return head


# One function per kind of value: (encoder, value, parent, step).
_Handler = Callable[[Encoder, Any, "Node | None", "list[Any]"], None]


def _none(encoder: Encoder, _value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"n")


def _bool(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"T" if value else b"F")


def _int(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"i%x;" % value)


def _float(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"f" + struct.pack(">d", value))


def _complex(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"j" + struct.pack(">dd", value.real, value.imag))


def _str(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.text(value)
    encoder.path(value)


def _bytes(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.raw(b"b", value)
    if len(value) < 4096:
        encoder.path(os.fsdecode(value))


def _path(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    text = os.fspath(value)
    encoder.parts.append(b"P")
    encoder.text(text)
    encoder.path(text)


def _pure_path(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"p")
    encoder.text(str(value))
    encoder.path(str(value))


def _constant(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"o")
    encoder.text(type(value).__name__)


def _range(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    encoder.parts.append(b"r" if type(value) is range else b"z")
    for part in (value.start, value.stop, value.step):
        encoder.value(part, parent, step)


def _bytearray(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    if encoder.node(value, parent, step) is not None:
        encoder.raw(b"B", bytes(value))


def _list(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    node = encoder.node(value, parent, step)
    if node is not None:
        encoder.parts.append(b"l")
        encoder.sequence(list(value), len(value), node)


def _tuple(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    encoder.parts.append(b"t")
    encoder.sequence(value, len(value), parent, step)


def _dict(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    if value is encoder.filled:
        encoder.parts.append(b"u")
        return
    node = encoder.node(value, parent, step)
    if node is not None:
        encoder.parts.append(b"d")
        encoder.items(value, node)


def _ordered(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    node = encoder.node(value, parent, step)
    if node is not None:
        encoder.parts.append(b"O")
        if type(value) is defaultdict:
            encoder.parts.append(b"d")
            encoder.value(value.default_factory, node, ["x"])
        encoder.items(value, node)


def _set(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    if type(value) is set and encoder.node(value, parent, step) is None:
        return
    outer, frozen = encoder.parts, encoder._frozen
    encoder._frozen = True
    encoded = []
    try:
        for part in value:
            encoder.parts = []
            encoder.value(part, None, [])
            encoded.append(b"".join(encoder.parts))
    finally:
        encoder.parts, encoder._frozen = outer, frozen
    encoder.parts.append(b"{%d:" % len(encoded) if type(value) is set else b"Z%d:" % len(encoded))
    for data in sorted(encoded):
        encoder.raw(b"", data)


def _class(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.reference(value)


def _function(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.reference(value)


def _builtin(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    if isinstance(value.__self__, type):
        encoder.parts.append(b"M")
        encoder.reference(value.__self__)
        encoder.text(value.__name__)
    else:
        encoder.reference(value)


def _method(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    if not isinstance(value.__self__, type):
        raise encoder.refuse(value, "is a method of an object, whose state Overmind does not compare")
    encoder.parts.append(b"m")
    encoder.reference(value.__self__)
    encoder.reference(value.__func__)


def _partial(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    node = encoder.node(value, parent, step)
    if node is not None:
        encoder.parts.append(b"q")
        encoder.value(value.func, node, ["g", "func"])
        encoder.value(value.args, node, ["g", "args"])
        encoder.value(value.keywords, node, ["g", "keywords"])
        encoder.attributes(value, node)


def _enum(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    encoder.parts.append(b"e")
    encoder.reference(type(value))
    name = object.__getattribute__(value, "__dict__").get("_name_")
    if type(name) is str:
        encoder.text(name)
    else:  # a combination of flags has no name of its own in every Python
        encoder.value(value._value_, None, [])


def _named_tuple(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    encoder.parts.append(b"N")
    encoder.reference(type(value))
    encoder.sequence(tuple.__iter__(value), tuple.__len__(value), parent, step)


def _dataclass(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    node = encoder.node(value, parent, step)
    if node is not None:
        encoder.parts.append(b"D")
        encoder.reference(type(value))
        encoder.attributes(value, node)


def _content(encoder: Encoder, value: Any, parent: Node | None, step: list[Any]) -> None:
    """A library's own object, by its class and all of its attributes."""
    node = encoder.node(value, parent, step)
    if node is None:
        return
    encoder.parts.append(b"C")
    encoder.reference(type(value))
    if isinstance(value, dict):
        encoder.quietly(lambda: encoder.items(value, node))
    encoder.quietly(lambda: encoder.attributes(value, node))


_FILE_REASON = "is an open file or a stream: its position and content are not part of a key"


def _file(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    raise encoder.refuse(value, _FILE_REASON)


def _unknown(encoder: Encoder, value: Any, _parent: Node | None, _step: list[Any]) -> None:
    raise encoder.refuse(value)


_BY_TYPE: dict[int, _Handler] = {
    id(kind): handler
    for kind, handler in {
        type(None): _none,
        bool: _bool,
        int: _int,
        float: _float,
        complex: _complex,
        str: _str,
        bytes: _bytes,
        bytearray: _bytearray,
        list: _list,
        tuple: _tuple,
        dict: _dict,
        OrderedDict: _ordered,
        defaultdict: _ordered,
        set: _set,
        frozenset: _set,
        range: _range,
        slice: _range,
        type(Ellipsis): _constant,
        type(NotImplemented): _constant,
        type: _class,
        types.FunctionType: _function,
        types.BuiltinFunctionType: _builtin,
        types.MethodType: _method,
        functools.partial: _partial,
        pathlib.PosixPath: _path,
        pathlib.PurePosixPath: _pure_path,
        pathlib.PureWindowsPath: _pure_path,
    }.items()
}

# What makes a class known, by (module prefix, name) of any of its bases.
_CONTENT_BASES = {
    ("transformers.", "PreTrainedConfig"),
    ("transformers.", "PretrainedConfig"),
    ("transformers.", "GenerationConfig"),
    ("transformers.", "QuantizationConfigMixin"),
    ("diffusers.", "ConfigMixin"),
    ("diffusers.", "FrozenDict"),
    ("diffusers.", "QuantizationConfigMixin"),
    ("diffusers.", "PipelineQuantizationConfig"),
    ("peft.", "PeftConfigMixin"),
}
_EMBEDDED_BASES = {
    ("transformers.", "PreTrainedTokenizerBase"),
    ("transformers.", "ProcessorMixin"),
    ("transformers.", "ImageProcessingMixin"),
    ("transformers.", "FeatureExtractionMixin"),
}
_known: dict[int, tuple[type, _Handler]] = {}  # by id of the class, which is kept alive


def _handler_of(value: Any) -> _Handler:
    kind = type(value)
    known = _known.get(id(kind))
    if known is None:
        if len(_known) > 4096:
            _known.clear()
        known = _known[id(kind)] = (kind, _find_handler(kind))
    return known[1]


def _has_base(kind: type, wanted: set[tuple[str, str]]) -> bool:
    return any((f"{base.__module__.partition('.')[0]}.", base.__name__) in wanted for base in kind.__mro__)


def _find_handler(kind: type) -> _Handler:
    from overmind import encoding_torch

    if issubclass(kind, type):
        return _class
    if issubclass(kind, enum.Enum):
        return _enum
    if issubclass(kind, io.IOBase):
        return _file
    special: _Handler | None = encoding_torch.handler(kind)
    if special is not None:
        return special
    if _has_base(kind, _EMBEDDED_BASES):
        return encoding_torch.embedded
    if _has_base(kind, _CONTENT_BASES):
        return _content
    if issubclass(kind, tuple) and type(getattr(kind, "_fields", None)) is tuple and kind.__bases__ == (tuple,):
        return _named_tuple
    if issubclass(kind, (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)):
        return _unknown
    if dataclasses.is_dataclass(kind) and "__dataclass_params__" in kind.__dict__:
        return _dataclass
    return _unknown


def warm() -> None:
    """Does what a process's first key needs once: imports, and where installed code lies."""
    _find_handler(object)
    Encoder().argument("", Encoder)


def is_scalar(value: Any) -> bool:
    return type(value) in _SCALARS


def loaded(name: str) -> Any:
    """The module if it is imported, else None. Never imports."""
    return sys.modules.get(name)
