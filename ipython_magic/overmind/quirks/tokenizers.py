# SPDX-License-Identifier: MIT
"""Fast tokenizers: the Rust part of a restored one is built when it is first used.

Building it is most of a native load and of a hit alike: 0.2 s for the 49,408 tokens of CLIP, 0.5 s for 128,000, with
the GIL held (tokenizers 0.23, Tokenizer.from_str). So a hit restores everything else of a transformers tokenizer, and
in the place of its `_tokenizer` an Unbuilt, which has the state as bytes of the entry. transformers gives the class
`_tokenizer = None`; a descriptor in that place builds the real one when it is asked for and puts it where the Unbuilt
was. Who looks into `vars()` before finds the name where it is natively, and an object that acts as the real one.
Copies and pickles ask for it first. Thread safety: one thread builds, others wait.
"""

from __future__ import annotations

import copy
import marshal
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

from overmind import _core

_BASES = (
    ("transformers.tokenization_utils_tokenizers", "TokenizersBackend"),
    ("transformers.tokenization_utils_fast", "PreTrainedTokenizerFast"),
)
_BIG = 1000  # parts of a table that is worth packing
_SCALARS = {bool, bytes, float, int, str, type(None)}
_WRAP = "_wrap_decode_method_backend_tokenizer"
_lock = threading.RLock()


class Unbuilt:
    """The Rust tokenizer of a restored one until it is first used; whatever is asked of it builds it."""

    __slots__ = ("_built", "_state", "_wrapped")

    def __init__(self, state: Any, wrapped: bool) -> None:
        self._state = state
        self._wrapped = wrapped
        self._built: Any = None

    def build(self) -> tuple[Any, bool]:
        """The Rust tokenizer, the same one each time, and whether its class is still to wrap it. Under _lock."""
        if self._built is None:
            import tokenizers
            from tokenizers.models import BPE

            backend = tokenizers.Tokenizer(BPE())
            backend.__setstate__(bytes(self._state))
            self._built, self._state = backend, None
        return self._built, self._wrapped

    def __getattr__(self, name: str) -> Any:
        with _lock:
            return getattr(self.build()[0], name)

    def __repr__(self) -> str:
        with _lock:
            return repr(self.build()[0])

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Copies and pickles are of the real one, and name nothing of Overmind."""
        with _lock:
            return copy.copy, (self.build()[0],)


class _OnDemand:
    """Stands where the class has `_tokenizer = None`. A data descriptor: it is asked before the instance's own."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def __get__(self, tokenizer: Any, owner: type | None = None) -> Any:
        if tokenizer is None:
            return self._default
        own = tokenizer.__dict__.get("_tokenizer", self._default)
        return build(tokenizer) if type(own) is Unbuilt else own

    def __set__(self, tokenizer: Any, value: Any) -> None:
        tokenizer.__dict__["_tokenizer"] = value

    def __delete__(self, tokenizer: Any) -> None:
        if "_tokenizer" not in tokenizer.__dict__:
            raise AttributeError("_tokenizer")
        del tokenizer.__dict__["_tokenizer"]


def unbuilt(state: dict[str, Any]) -> bool:
    """Whether this is the __dict__ of a tokenizer whose Rust part was not built yet."""
    return type(state.get("_tokenizer")) is Unbuilt


def reducer(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """How the objects of this class are pickled into a skeleton; None: pickle's own way."""
    base = _base(kind)
    if base is None or not _ordinary(kind):
        return None
    return _reduce


def build(tokenizer: Any) -> Any:
    """The Rust tokenizer of a restored one. Raises what tokenizers raises for a state it can't read."""
    with _lock:
        found = tokenizer.__dict__["_tokenizer"]
        if type(found) is not Unbuilt:
            return found
        backend, wrapped = found.build()
        tokenizer.__dict__["_tokenizer"] = backend
        if wrapped:
            getattr(tokenizer, _WRAP)()
        return tokenizer.__dict__["_tokenizer"]


def restore(kind: Any) -> Any:
    """Pickle's call on a hit: a tokenizer of class `kind`, still without its attributes."""
    base = _base(kind)
    if base is None:
        raise pickle.UnpicklingError(f"{kind.__qualname__} is no tokenizer of transformers any more")
    _install(base)
    return kind.__new__(kind)


def _reduce(tokenizer: Any) -> tuple[Any, ...]:
    import tokenizers

    kind, own = type(tokenizer), tokenizer.__dict__
    if unbuilt(own):
        build(tokenizer)
    backend = own.get("_tokenizer")
    if type(backend) is not tokenizers.Tokenizer:
        return tokenizer.__reduce_ex__(5)  # type: ignore[no-any-return]
    wrapped = _is_wrapped(kind, backend)
    if not wrapped:
        refuse_attributes(backend)
    state: dict[str, Any] = {name: _Packed(own[name]) if _is_packable(own, name) else own[name] for name in own}
    state["_tokenizer"] = _Backend(backend, wrapped)
    return restore, (kind,), state


class _Backend:
    """A Rust tokenizer in an entry."""

    def __init__(self, backend: Any, wrapped: bool) -> None:
        self._backend = backend
        self._wrapped = wrapped

    def __reduce__(self) -> tuple[Any, ...]:
        return Unbuilt, (pickle.PickleBuffer(self._backend.__getstate__()), self._wrapped)


class _Packed:
    """A table of plain values, written by marshal: pickle takes 40 ms for the tokens and merges of CLIP."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (pickle.PickleBuffer(marshal.dumps(self._table)),)


def unpack(data: Any) -> Any:
    """Pickle's call on a hit: the table as it was."""
    return marshal.loads(data)


def _is_packable(own: dict[str, Any], name: str) -> bool:
    """A big dict or list of plain values, or of tuples of them, that nothing but `own` refers to: it has no alias that
    pickle would keep, and marshal takes its values exactly."""
    table = own[name]
    if type(table) not in (dict, list) or len(table) < _BIG or sys.getrefcount(table) > 3:  # own, `table`, the call
        return False
    return _core.holds_only(table, _SCALARS)


def refuse_attributes(backend: Any) -> None:
    """Pickle of the Rust classes keeps their state and drops what was set on the object, a `decode` say."""
    own = getattr(backend, "__dict__", None)
    if own:
        raise ValueError(
            f"a {type(backend).__qualname__} with attributes of its own ({', '.join(own)}), which pickle drops"
        )


def _is_wrapped(kind: Any, backend: Any) -> bool:
    """CLIP's tokenizer replaces `decode` of its Rust tokenizer by a local function; its own method does it again."""
    method = getattr(kind, _WRAP, None)
    decode = vars(backend).get("decode")
    return (
        method is not None
        and len(vars(backend)) == 1
        and getattr(decode, "__qualname__", "") == f"{method.__qualname__}.<locals>.new_decode_method"
    )


def _base(kind: type) -> Any:
    """The class of transformers that holds the Rust tokenizer; None for any other class."""
    for base in kind.__mro__:
        if (base.__module__, base.__qualname__) in _BASES and base.__dict__.get("_tokenizer", base) is not base:
            return base
    return None


def _ordinary(kind: Any) -> bool:
    """Whether pickle would take such an object apart in its usual way, which _reduce() follows."""
    usual = (object.__reduce__, object.__reduce_ex__)
    return (
        (kind.__reduce__, kind.__reduce_ex__) == usual
        and getattr(kind, "__getstate__", None) in (getattr(object, "__getstate__", None), _getstate)
        and not hasattr(kind, "__setstate__")
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and kind.__new__ is object.__new__
    )


def _getstate(tokenizer: Any) -> Any:
    """As object.__getstate__ of a class without slots, with the Rust part in it."""
    if unbuilt(tokenizer.__dict__):
        build(tokenizer)
    return tokenizer.__dict__


def _install(base: Any) -> None:
    """Stays after %unload_ext: a tokenizer that was restored before may not have been used yet."""
    with _lock:
        current = base.__dict__["_tokenizer"]
        if not isinstance(current, _OnDemand):
            base._tokenizer = _OnDemand(current)
            base.__getstate__ = _getstate
