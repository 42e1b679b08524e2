# SPDX-License-Identifier: MIT
"""One call of a loader as a key: what was asked for, of which code, in which environment.

Two calls have one key only if the native load gives both the same. Measured with transformers 5.24 and diffusers
0.42: a loaded object keeps the path as it was spelled (`name_or_path`, './m' or 'm' or absolute), so the spelling is
in the key beside the resolved path; a Path and its os.fspath() give the same. No library expands '~', so neither
does this.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from overmind import _core, ambient, dependencies, encoding, hub
from overmind.encoding import Encoder, Uncacheable
from overmind.loader import BoundCall, Loader
from overmind.substitution import Arguments

__all__ = ["Request", "Uncacheable", "encode_arguments", "make_request", "prepare"]

_COMMON = frozenset({"torch", "numpy", "transformers", "diffusers"})  # what an unknown callable is likely to use
FORMAT = b"overmind key 5"  # raise it when keys, skeletons or dependencies change their meaning


@dataclass
class Request:
    """A call that may be cached. Holds the caller's objects."""

    key: bytes
    """32 bytes."""
    target: str
    """What is loaded, for display."""
    call: BoundCall
    arguments: Arguments
    encoded: Encoder
    """The arguments alone, as they were: to notice that a load changed them."""
    folders: list[str] = field(default_factory=list)
    """Existing folders that arguments name, and the hub's snapshot."""
    files: list[str] = field(default_factory=list)
    """Existing files that arguments name."""
    code: list[list[Any]] = field(default_factory=list)
    """Dependencies on the user's own modules that the callable or an argument comes from."""
    modes: str = ""
    """Settings of torch that are not its own, as ambient.torch_state() says them."""
    snapshot: hub.Snapshot | None = None
    """The hub's commit, if the target is a repository."""

    narrowed: bool = False
    """The key is of narrow()."""

    @property
    def generic(self) -> bool:
        """True for a callable of which nothing is known (overmind.load)."""
        return not self.call.loader.target

    def narrow(self, state: str) -> None:
        """Goes on under a key of its own for processes whose libraries are like this one's: `state`, as text. The entry
        under the first key was made by a process with other ones, and is right there. Once."""
        assert not self.narrowed
        self.key = hashlib.sha256(self.key + state.encode("utf-8", "replace")).digest()
        self.narrowed = True


@dataclass(frozen=True)
class _Binder:
    """How the calls of one function are bound. inspect.Signature.bind does the same in 25 us; this takes 4."""

    function: Callable[..., Any]  # kept alive: the cache is by id
    identities: bytes  # of its code and defaults, which may be set
    by_position: tuple[str, ...]
    only_position: frozenset[str]
    by_name: tuple[str, ...]
    defaults: dict[str, Any]
    positional: str | None  # the name of *args
    keywords: bool
    module: str
    qualname: str
    target: str  # the loader's: the parameter that names what is loaded

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, in the order of the parameters, then the other keywords. Uncacheable: no fit.

        A function of the user's may give its keywords' order back; a loader that is known does not look at it.
        """
        bound = dict(zip(self.by_position, args, strict=False))
        given = dict(kwargs)
        for name in self.by_position[len(args) :]:
            self._fill(bound, name, {} if name in self.only_position else given)
        if self.positional is not None:
            bound[self.positional] = args[len(self.by_position) :]
            if self.target and self.target not in self.by_position and bound[self.positional]:
                # AutoModel.from_pretrained(*model_args, **kwargs) takes its target from the front of these.
                bound[self.target], *rest = bound[self.positional]
                bound[self.positional] = tuple(rest)
        elif len(args) > len(self.by_position):
            raise Uncacheable(f"{self.qualname} was given too many arguments")
        for name in self.by_name:
            self._fill(bound, name, given)
        for name in sorted(given) if self.target else given:
            if not self.keywords or name in bound:
                raise Uncacheable(f"{self.qualname} was given an argument {name!r} that does not fit")
            bound[name] = given[name]
        return bound

    def _fill(self, bound: dict[str, Any], name: str, given: dict[str, Any]) -> None:
        if name in given:
            bound[name] = given.pop(name)
        elif name in self.defaults:
            bound[name] = self.defaults[name]
        else:
            raise Uncacheable(f"{self.qualname} was not given its argument {name!r}")


def _make_binder(function: Any, signature: inspect.Signature, skip: int, target: str) -> _Binder:
    kinds = inspect.Parameter
    parameters = list(signature.parameters.values())
    while skip and parameters and parameters[0].kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
        parameters = parameters[1:]  # filled by the method's receiver
        skip = 0
    positions = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    return _Binder(
        function,
        _identities(function),
        tuple(parameter.name for parameter in parameters if parameter.kind in positions),
        frozenset(parameter.name for parameter in parameters if parameter.kind is kinds.POSITIONAL_ONLY),
        tuple(parameter.name for parameter in parameters if parameter.kind is kinds.KEYWORD_ONLY),
        {parameter.name: parameter.default for parameter in parameters if parameter.default is not kinds.empty},
        next((parameter.name for parameter in parameters if parameter.kind is kinds.VAR_POSITIONAL), None),
        any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters),
        function.__module__ or "",
        function.__qualname__,
        target,
    )


_binders: dict[tuple[int, bool, bool, str], _Binder] = {}


def make_request(
    loader: Loader, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: type | None
) -> Request:
    """The request for `function(*args, **kwargs)`. Raises Uncacheable only; changes nothing. Thread-safe."""
    try:
        return _request(loader, function, args, kwargs, owner)
    except dependencies.Refused as refused:
        raise Uncacheable(str(refused)) from None
    except OSError as error:
        raise Uncacheable(f"an argument's path can't be resolved ({error})") from None
    except RecursionError:
        raise Uncacheable("an argument is nested too deeply to compare") from None


def _request(
    loader: Loader, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: type | None
) -> Request:
    call, binder = _bind(loader, function, args, kwargs, owner)
    reason = loader.refuse(call)
    if reason is not None:
        raise Uncacheable(reason)
    target = _target_of(call, binder)
    encoder = encode_arguments(call)
    request = Request(b"", _display(target), call, Arguments(call.arguments, encoder.nodes), encoder)
    environment = Encoder()
    environment.raw(b"K", FORMAT)
    environment.text(loader.name)
    environment.text(f"{binder.module}:{binder.qualname}")
    environment.raw(b"h", b"".join(encoder.parts))
    _write_code(environment, encoder, request, function, owner)
    _write_paths(environment, encoder, request, target)
    libraries = frozenset(loader.libraries) | environment.packages | encoder.packages
    request.modes = ambient.write(environment, libraries | _COMMON if request.generic else libraries)
    environment.argument("ambient", loader.ambient(call))
    request.key = hashlib.sha256(b"".join(environment.parts)).digest()
    return request


def prepare(loader: Loader, function: Callable[..., Any]) -> None:
    """Reads the signature of a loader ahead of its first call, which otherwise takes 0.2 ms for it. Raises nothing."""
    with contextlib.suppress(Uncacheable):
        _binder(function, loader)


def encode_arguments(call: BoundCall) -> Encoder:
    """The bound arguments of `call` as they are now."""
    encoder = Encoder(embeds=call.loader.embeds_modules, filled=call.filled)
    for name, value in call.arguments.items():
        encoder.argument(name, value)
    if call.filled is not None:
        encoder.argument(f"names in {call.loader.fills}", tuple(call.before))
    return encoder


def _bind(
    loader: Loader, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: type | None
) -> tuple[BoundCall, _Binder]:
    binder = _binder(function, loader)
    return BoundCall(loader, function, args, kwargs, owner, binder.bind(args, kwargs)), binder


def _binder(function: Callable[..., Any], loader: Loader) -> _Binder:
    method = type(function) is types.MethodType
    plain: Any = getattr(function, "__func__", function) if method else function
    if not isinstance(plain, (types.FunctionType, types.BuiltinFunctionType, type)):
        raise Uncacheable(f"a {type(plain).__qualname__} is called, which has no name to know it by")
    trusted = (plain.__module__ or "").partition(".")[0] in loader.libraries
    if loader.target and not trusted:
        raise Uncacheable(f"the loader was replaced by {plain.__module__}.{plain.__qualname__}")
    known = _binders.get((id(plain), method, trusted, loader.target))
    if known is not None and known.function is plain and known.identities == _identities(plain):
        return known
    try:
        # A decorator of a library itself passes arguments on unchanged; another one may have defaults of its own.
        signature = inspect.signature(plain, follow_wrapped=trusted)
    except (TypeError, ValueError):
        raise Uncacheable(f"{plain.__qualname__} has no signature to bind its arguments to") from None
    binder = _make_binder(plain, signature, int(method), loader.target)
    if len(_binders) > 1024:
        _binders.clear()
    _binders[id(plain), method, trusted, loader.target] = binder
    return binder


def _identities(function: Any) -> bytes:
    """Alike as long as its signature is; of a class, what makes its objects."""
    is_class = isinstance(function, type)
    makers = [getattr(function, name) for name in ("__new__", "__init__")] if is_class else [function]
    return b"".join(_core.identities(each) for each in makers if type(each) is types.FunctionType)


def _target_of(call: BoundCall, binder: _Binder) -> Any:
    loader = call.loader
    if loader.target:
        target = call.arguments.get(loader.target)
        if isinstance(target, os.PathLike) and type(target) in encoding.PATHS:
            call.arguments[loader.target] = target = os.fspath(target)  # natively the same, measured: see above
        return target
    first = next(iter(call.arguments.items()), None)
    if first is None:
        return None
    if first[0] == binder.positional:
        return first[1][0] if first[1] else None
    return first[1]


def _display(target: Any) -> str:
    if isinstance(target, str):
        return target
    if type(target) is bytes or type(target) in encoding.PATHS:
        return os.fsdecode(target)
    return "" if target is None else type(target).__qualname__


def _write_code(
    environment: Encoder, encoder: Encoder, request: Request, function: Callable[..., Any], owner: type | None
) -> None:
    """Whose code runs. That of a library is known by its version, that of the user by its files."""
    if owner is not None:
        environment.argument("cls", owner)
    if request.generic:
        environment.argument("function", function)
    own = environment.code | encoder.code
    if own:
        request.code = dependencies.of_classes(own)


def _write_paths(environment: Encoder, encoder: Encoder, request: Request, target: Any) -> None:
    """Every string that names a file or folder is resolved here, in the caller's working directory."""
    for text in encoder.paths:
        try:
            folder = os.path.isdir(text)
            if not folder and not os.path.exists(text):
                continue
        except ValueError:  # a lone surrogate
            continue
        environment.text(text)
        environment.text(os.path.realpath(text))
        (request.folders if folder else request.files).append(os.path.abspath(text))
    loader = request.call.loader
    if request.generic or encoder.too_many_paths:
        environment.text(os.getcwd())
    if loader.target and isinstance(target, (str, bytes)) and not os.path.exists(target):
        if not loader.hub or not isinstance(target, str):
            raise Uncacheable(f"{request.target!r} does not exist")
        request.snapshot = snapshot = hub.resolve(target, request.call.arguments)
        environment.text(snapshot.commit)
        environment.text(snapshot.folder)
        environment.raw(b"h", snapshot.credentials)
        if os.path.isdir(snapshot.folder):
            request.folders.append(snapshot.folder)
