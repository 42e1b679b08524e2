# SPDX-License-Identifier: MIT
"""Library classes that a notebook changed: another `__init__`, a method of its own, a class put in another's place.

A load that meets one makes what no other process would, and a restored object is not what a load here would make. Both
go native. Only the process's own state can tell, so classes that a result is made of are looked at when it is taken
and at every hit: 0.3 ms for a model, 1.4 ms for a pipeline (two busy cores). Functions of modules are not looked at.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from overmind import modules

_HARMLESS = {"forward"}  # a loader of a library never runs a model
_HOLDERS = {classmethod, staticmethod, property, types.MethodType}
_Test = Callable[[Any], bool]


def found(names: Iterable[tuple[str, str]]) -> str | None:
    """What the user changed of the classes that a pickle names by (module, qualified name), or None.

    Modules that are not imported have their library's own state; the user's own modules are known by their files.
    """
    is_users = functools.cache(_is_users)
    seen: set[type] = {object}
    for module, qualname in names:
        value = modules.named(module, qualname)
        if value is None or is_users(module):
            continue
        if not isinstance(value, type):
            if _by_user(value, is_users):
                return f"{module}.{qualname} was replaced in this process"
            continue
        if value.__qualname__ != qualname and is_users(value.__module__):
            return f"{module}.{qualname} was replaced by {value.__module__}.{value.__qualname__} in this process"
        for base in value.__mro__:
            if base not in seen:
                seen.add(base)
                name = None if is_users(base.__module__) else _changed_member(base, is_users)
                if name is not None:
                    return f"{base.__module__}.{base.__qualname__}.{name} was changed in this process"
    return None


def _changed_member(kind: type, is_users: _Test) -> str | None:
    home = sys.modules.get(kind.__module__)
    own = None if home is None else vars(home)
    # Nearly all are functions of the class's own module: 0.05 us for each of them.
    others = [
        name
        for name, member in list(vars(kind).items())
        if (member.__globals__ is not own if type(member) is types.FunctionType else _may_call(type(member)))
    ]
    return next((name for name in others if name not in _HARMLESS and _by_user(vars(kind)[name], is_users)), None)


def _may_call(kind: type) -> bool:
    """Whether such a member of a class may run code that is not C's: plain values are most of the rest."""
    return kind in _HOLDERS or kind.__module__ != "builtins"


def _by_user(member: Any, is_users: _Test) -> bool:
    if is_users(type(member).__module__):
        return True  # an object of the user's own class, called or asked in a function's place
    if type(member) is property:
        return any(_by_user(part, is_users) for part in (member.fget, member.fset, member.fdel) if part is not None)
    return any(is_users(function.__globals__.get("__name__")) for function in _functions(member))


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
        else:
            return


def _is_users(module: Any) -> bool:
    """A module that is here and is not installed; the notebook above all."""
    return module == "__main__" or (module in sys.modules and not modules.installed(module))
