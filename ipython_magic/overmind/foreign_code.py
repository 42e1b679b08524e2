# SPDX-License-Identifier: MIT
"""Libraries that a process changed: another `__init__`, another class under a layer's name, another class attribute.

A load that meets a change makes what no other process would, and a restored object is not what a load here would make.
Only a process's own state can tell, so the classes that a result is made of are looked at when it is taken and at every
hit, with the modules that define them and the packages that these lie in:

- What stands there by the user's own code (the notebook's, or a module's that is not installed) makes a load native.
- What installed packages or plain values change there (liger_kernel puts layers of its own into transformers, a
  notebook sets `_no_split_modules`) is kept with the entry as digests. Processes with other ones have their own entry.

Not looked at: modules that only help a load and define no class of its result, methods that only run when the model
does (`forward`), defaults of functions outside classes, `torch.load`, and what is an object of a library's own.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from overmind import _core, modules

_Test = Callable[[Any], bool]
_UNSAID = {
    "forward",  # a loader of a library never runs a model
    # What transformers 5.24 sets on classes as it loads, or a hit does (quirks/tokenizers.py): a second load finds it.
    "smart_apply",
    "_can_set_experts_implementation_cached_value",
    "_tokenizer",
}
_SCALARS: set[type] = {bool, int, float, str, bytes, type(None), complex}
_NEUTRAL = {"overmind", *sys.stdlib_module_names}  # Overmind's own wrappers, and what the standard library gives
_SILENT_IN_CLASSES: set[type] = {
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.BuiltinFunctionType,
}
_SILENT_IN_MODULES: set[type] = _SCALARS | {types.ModuleType, types.BuiltinFunctionType, list, tuple, set, frozenset}
_SILENT_IN_TABLES = _SCALARS | {list, dict, set, frozenset}
_HELPERS = "torch.nn.init"  # draws the weights that a file lacks; its functions are replaced to save that time
_CACHED = type(functools.lru_cache(_core.identities))
_HOLDERS = (classmethod, staticmethod, property, types.MethodType, functools.partial, functools.partialmethod, _CACHED)
_CODE = {types.FunctionType, *_HOLDERS}
_OFTEN_WRAPPED = {"torch.load"}  # to give it weights_only=False; who calls it directly has its loader replaced
# What most models are made of: looked at while a library is imported.
_FAMILIAR = (
    *(("torch.nn.modules.container", name) for name in ("ModuleList", "Sequential")),
    *(("torch.nn.modules.normalization", name) for name in ("GroupNorm", "LayerNorm")),
    ("torch.nn.modules.linear", "Linear"),
    ("torch.nn.modules.sparse", "Embedding"),
    ("torch.nn.modules.conv", "Conv2d"),
    ("torch.nn.modules.dropout", "Dropout"),
    ("torch.nn.parameter", "Parameter"),
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.modeling_layers", "GradientCheckpointingLayer"),
    ("transformers.configuration_utils", "PreTrainedConfig"),
    ("transformers.generation.utils", "GenerationMixin"),
    ("transformers.generation.configuration_utils", "GenerationConfig"),
    ("diffusers.models.modeling_utils", "ModelMixin"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline"),
)
_MAX_PARTS = 1000  # of a container: more is a table of data


@dataclass(frozen=True)
class State:
    """What the libraries of one result are like in this process."""

    by_user: str | None
    """What the user's own code changed, as a reason for people; None if nothing."""
    labels: list[str]
    """What was looked at: modules, then classes."""
    digests: list[str]
    """Of each, in the same order: equal ones are alike. An entry keeps them."""
    missing: str | None = None
    """Why a module of the result can't be imported here; then nothing was looked at."""

    def difference(self, kept: Sequence[str]) -> str | None:
        """Why an entry that kept these digests is not what a load here would make; None if it is."""
        if self.missing is not None or self.digests == kept:
            return self.missing
        pairs = zip(self.labels, self.digests, kept, strict=False)
        label = next((label for label, here, there in pairs if here != there), "a class of its result")
        return f"{label} has been changed, in this process or in the one that the result was kept from"

    def text(self) -> str:
        """Equal for processes that are alike in what was looked at."""
        return self.missing or "\n".join(self.digests)


def state(names: Iterable[Sequence[str]], loader: Callable[..., Any]) -> State:
    """Of the classes that a pickle names by (module, qualified name), which are imported for it, and of the module that
    `loader` comes from; `names` in the same order every time. The user's own modules are known by their files.

    A Llama, 58 places: 3.2 ms the first time in a process, 1.4 after warm(), later 0.4 (two busy cores).
    """
    is_users = functools.cache(_is_users)
    by_user = None
    classes: dict[type, None] = {}
    for module, qualname in names:
        if module not in sys.modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                return State(None, [], [], f"{module}, where a part of its result comes from, is not here ({error})")
        value = modules.named(module, qualname)
        if value is None or is_users(module):
            continue
        if not issubclass(type(value), type):
            if _by_user(value, is_users):
                by_user = f"{module}.{qualname}"
            continue
        own = [base for base in value.__mro__ if not is_users(base.__module__)]
        if len(own) < len(value.__mro__):
            by_user = f"{module}.{qualname}"  # it is the user's, or has a base that is
        classes.update(dict.fromkeys(own))
    looks = [_look(*place, is_users) for place in _places(classes, loader, is_users)]
    by_user = by_user or next((f"{look.label}.{look.by_user}" for look in looks if look.by_user), None)
    reason = None if by_user is None else f"{by_user} was changed in this process"
    return State(reason, [look.label for look in looks], [look.digest for look in looks])


def warm() -> None:
    """Looks ahead at what most results are made of, as far as it is imported: 3 ms of an import of transformers. Of a
    Llama's 58 places a first hit then looks at 16 anew, which takes 1.4 ms in place of 3.2."""
    present = [(module, name) for module, name in _FAMILIAR if module in sys.modules]
    if present:
        state(present, modules.named)
        # Parameters are tensors, whose class is of the package `torch` itself; without them that is a mere package.
        state([place for place in present if place[1] != "Parameter"], modules.named)


def _places(classes: Iterable[type], loader: Callable[..., Any], is_users: _Test) -> Iterator[tuple[Any, str, bool]]:
    """Where to look: class or module, its name, and whether it is more than a package that the others lie in."""
    classes = [kind for kind in classes if kind.__module__.partition(".")[0] not in _NEUTRAL]
    homes = {name for name in [*(kind.__module__ for kind in classes), loader.__module__] if name in sys.modules}
    packages = {package for name in homes for package in _packages(name) if package in sys.modules} - homes
    if "torch.nn" in packages and _HELPERS in sys.modules:
        homes.add(_HELPERS)
    for name in sorted(homes | packages):
        if not is_users(name):
            yield sys.modules[name], name, name in homes
    for kind in classes:
        yield kind, f"{kind.__module__}.{kind.__qualname__}", True


def _packages(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@dataclass
class _Look:
    """What one class or module was like at the last look; `identities` tell whether that still holds."""

    holder: Any  # kept alive: the looks are by id
    label: str
    identities: bytes
    containers: list[Any]  # may change where they are
    contents: list[bytes]
    by_user: str | None
    digest: str


_looks: dict[tuple[int, bool], _Look] = {}


def _look(holder: Any, label: str, home: bool, is_users: _Test) -> _Look:
    """`home`: a class, or a module that defines one. Of other packages only the classes count."""
    known = _looks.get((id(holder), home))
    identities = _core.identities(holder)
    if known is not None and known.identities == identities:
        unchanged = all(map(bytes.__eq__, map(_contents, known.containers), known.contents))
        if unchanged:
            return known
    look = _new_look(holder, label, home, identities, is_users)
    _looks[id(holder), home] = look
    return look


def _new_look(holder: Any, label: str, home: bool, identities: bytes, is_users: _Test) -> _Look:
    is_class = isinstance(holder, type)
    place = _Place(sys.modules.get(holder.__module__) if is_class else holder, label, is_users)
    silent = _SILENT_IN_CLASSES if is_class else _SILENT_IN_MODULES
    for name, member in place.notable(holder, silent, None if home else _CODE):
        if is_class:
            place.class_member(name, member)
        else:
            place.module_member(name, member, home)
    if is_class:
        place.lines.append(" ".join(f"{base.__module__}.{base.__qualname__}" for base in holder.__mro__))
    digest = hashlib.sha1("\n".join(sorted(place.lines)).encode("utf-8", "replace"), usedforsecurity=False)
    contents = [_contents(container) for container in place.containers]
    return _Look(holder, label, identities, place.containers, contents, place.by_user, digest.hexdigest()[:12])


class _Place:
    """Gathers what is said of a class's or module's members; `own`: the globals of the module."""

    def __init__(self, module: types.ModuleType | None, label: str, is_users: _Test) -> None:
        self.own = {} if module is None else vars(module)
        self._is_users = is_users
        self._accepted = _accepted(label.partition(".")[0])
        self.lines: list[str] = []
        self.containers: list[Any] = []
        self.by_user: str | None = None
        self._label = label
        self._helpers = label == _HELPERS

    def notable(self, holder: Any, silent: set[type], only: set[type] | None = None) -> list[tuple[Any, Any]]:
        """Names and members; see _core.notable."""
        return _core.notable(holder, self.own, *self._accepted, silent, only, _UNSAID, self.lines)

    def module_member(self, name: str, member: Any, home: bool) -> None:
        kind = type(member)
        if kind is types.FunctionType and member.__globals__ is self.own:
            self._function(name, member)
        elif issubclass(kind, type):
            self._class(name, member)
        elif not home:
            if f"{self._label}.{name}" not in _OFTEN_WRAPPED and _by_user(member, self._is_users):
                self.by_user = self.by_user or name
        elif issubclass(kind, types.ModuleType):
            return
        elif issubclass(kind, dict):
            self._table(name, member)
        else:
            self._code(name, member)
            if kind not in _CODE and not self._is_users(kind.__module__):
                _SILENT_IN_MODULES.add(kind)

    def class_member(self, name: str, member: Any) -> None:
        kind = type(member)
        if issubclass(kind, type):
            self._class(name, member)
        elif kind in _CODE or kind.__module__ != "builtins":
            for function in _functions(member):
                self._function(name, function)
            if kind is not types.FunctionType or member.__globals__ is not self.own:
                self._code(name, member)
            if issubclass(kind, enum.Enum) or (kind.__module__, kind.__name__) == ("torch", "dtype"):
                self.lines.append(f"{name}={member}")
        elif not name.startswith("__"):
            if kind in (list, dict, set):
                self.containers.append(member)
            text = _plain(member)
            self.lines.append(f"{name}={kind.__name__ if text is None else text}")

    def _function(self, name: str, function: types.FunctionType) -> None:
        """Its code may have been exchanged, if it is of the same module, and its defaults set."""
        code = function.__code__
        own = function.__globals__ is self.own
        if own and code.co_filename != self.own.get("__file__"):  # dataclasses write some, in no file
            if code.co_filename.startswith("/") and not modules.installed_file(code.co_filename):
                self.by_user = self.by_user or name
            self.lines.append(f"{name}={_said(code)}")
        for defaults in (function.__defaults__, function.__kwdefaults__ and tuple(function.__kwdefaults__.items())):
            if defaults:
                text = [_plain(value) or type(value).__name__ for value in defaults]
                self.lines.append(f"{name}({text})")
                self.containers += [value for value in defaults if type(value) in (list, dict, set)]

    def _class(self, name: str, member: Any) -> None:
        self._known_by(name, member.__module__, member.__qualname__)

    def _code(self, name: str, member: Any) -> None:
        if self._is_users(_home_of(member)):
            self.by_user = self.by_user or name  # an object of the user's own class, called or asked in its place
        for function in _functions(member):
            self._known_by(name, function.__globals__.get("__name__"), function.__qualname__)

    def _table(self, name: str, table: dict[Any, Any]) -> None:
        """Activations, schedulers and the like by their names: a class or function of somebody else's in one."""
        if len(table) > _MAX_PARTS or table is self.own:
            return
        self.containers.append(table)
        for key, part in self.notable(table, _SILENT_IN_TABLES):
            if issubclass(type(part), type):
                self._class(f"{name}[{key!r}]", part)
            elif type(part) is types.FunctionType:
                self._code(f"{name}[{key!r}]", part)

    def _known_by(self, name: str, where: Any, qualname: str) -> None:
        _met, tops = self._accepted
        if isinstance(where, str) and where.partition(".")[0] in tops:
            return
        if self._is_users(where):
            self.by_user = self.by_user or name
        elif not self._helpers:
            self.lines.append(f"{name}={where}:{qualname}")


@functools.cache
def _accepted(top: str) -> tuple[set[str], frozenset[str]]:
    """Whose code is no change in a library: modules that were met, and top-level packages."""
    return set(), frozenset({top, *_NEUTRAL})


def _contents(container: Any) -> bytes:
    if isinstance(container, dict):
        return _core.identities(container)
    return str(_plain(container)).encode("utf-8", "replace")


def _plain(value: Any, depth: int = 0) -> str | None:
    """A plain value as text; None if it holds anything else."""
    kind = type(value)
    if kind in _SCALARS:
        return repr(value)
    if depth > 4 or kind not in (list, tuple, dict, set, frozenset) or len(value) > _MAX_PARTS:
        return None
    parts = [_plain(part, depth + 1) for part in (value.items() if kind is dict else value)]
    if None in parts:
        return None
    texts = [part for part in parts if part is not None]
    return f"{kind.__name__}({','.join(sorted(texts) if kind in (set, frozenset) else texts)})"


def _said(code: types.CodeType) -> str:
    """What code does, whatever file it is from."""
    parts = [code.co_code.hex(), *code.co_names]
    parts += [_said(part) if isinstance(part, types.CodeType) else str(_plain(part)) for part in code.co_consts]
    return hashlib.sha1("\n".join(parts).encode("utf-8", "replace"), usedforsecurity=False).hexdigest()


def _by_user(member: Any, is_users: _Test) -> bool:
    if is_users(_home_of(member)):
        return True  # an object of the user's own class, called or asked in a function's place
    return any(is_users(function.__globals__.get("__name__")) for function in _functions(member))


def _home_of(member: Any) -> Any:
    """The module of its class. The functions of all that Cython compiled have one class, in a module of no package."""
    home = type(member).__module__
    return getattr(member, "__module__", None) if home.startswith("_cython_") else home


def _functions(member: Any) -> Iterator[types.FunctionType]:
    """The Python functions that run when `member` of a class is used: itself, what it wraps, what it delegates to."""
    for _ in range(20):  # wrappers around wrappers; more are a cycle
        if isinstance(member, types.FunctionType):
            yield member
            member = vars(member).get("__wrapped__")
        elif isinstance(member, (classmethod, staticmethod, types.MethodType)):
            member = member.__func__
        elif isinstance(member, (functools.partial, functools.partialmethod, functools.cached_property)):
            member = member.func
        elif isinstance(member, _CACHED):
            member = member.__wrapped__
        else:
            break
    if isinstance(member, property):
        for part in (member.fget, member.fset, member.fdel):
            yield from _functions(part)


def _is_users(module: Any) -> bool:
    """A module that is here and is not installed; the notebook above all."""
    return module == "__main__" or (module in sys.modules and not modules.installed(module))
