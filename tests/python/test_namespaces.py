# SPDX-License-Identifier: MIT
"""What overmind._core sees in the namespaces of classes, modules and dicts."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from typing import Any, ClassVar

import pytest
from overmind import _core

SILENT = {int, str, type(None), types.ModuleType}


def module_of(source: str, name: str = "library.part") -> types.ModuleType:
    module = types.ModuleType(name)
    exec(source, vars(module))
    return module


def seen(holder: Any, own: dict[str, Any], quiet: set[str], silent: set[type] = SILENT) -> dict[Any, Any]:
    return dict(_core.notable(holder, own, quiet, silent))


def test_identities_change_with_the_members_only() -> None:
    class Root:
        pass

    class Base(Root):
        pass

    class Some(Root):
        kept: ClassVar[list[int]] = []

    module = module_of("a = []\nb = 1000")
    for holder, inside in ((Some, Some.kept), (module, module.a), ({"a": [], "b": 2}, [])):
        before = _core.identities(holder)
        inside.append(1)
        assert _core.identities(holder) == before

    def changed(x: int = 1, *, y: int = 2) -> None:
        pass

    Some.method = changed  # type: ignore[attr-defined]
    for change in (
        lambda: setattr(changed, "__code__", (lambda x, y: None).__code__),
        lambda: setattr(changed, "__defaults__", (3,)),
        lambda: setattr(changed, "__kwdefaults__", {"y": 3}),
        lambda: setattr(Some, "__bases__", (Base,)),
    ):
        before = _core.identities(Some)
        change()
        assert _core.identities(Some) != before
    before = _core.identities(module)
    module.b = 2000
    after = _core.identities(module)
    module.c = 1
    assert before != after and len(_core.identities(module)) == len(after) + 8
    del module.c
    assert _core.identities(module) == after


def test_a_library_s_own_is_not_notable() -> None:
    other = module_of("def helper(): pass\nclass Part: pass", "library.other")
    module = module_of("import sys\nnumber = 1\ndef own(): pass\nclass Mine: pass\nnothing = None")
    module.helper, module.Part = other.helper, other.Part
    assert seen(module, vars(module), {"library.part", "library.other"}) == {}
    assert set(seen(module, vars(module), {"library.part"})) == {"helper", "Part"}
    assert set(seen(module, {}, set())) == {"own", "Mine", "helper", "Part"}


def test_what_may_run_other_code_is_notable() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise AssertionError("asked")

    module = module_of("def own(): pass")
    other = module_of("def inner(): pass\ndef outer(): pass", "library.other")
    module.decorated = functools.wraps(other.inner)(other.outer)
    module.partial = functools.partial(other.inner)
    module.Strange = Meta("Strange", (), {"__module__": "elsewhere"})
    module.Usual = Meta("Usual", (), {"__module__": "library.part"})
    module.instance = object()
    quiet = {"library.part", "library.other"}
    assert set(seen(module, vars(module), quiet)) == {"decorated", "partial", "Strange", "instance"}


def test_a_module_s_dunders_are_its_own_and_a_class_s_are_not() -> None:
    class Some:
        __init__ = module_of("def __init__(self): pass").__init__
        pair = ("a", "b")

    assert "__builtins__" not in seen(module_of("def own(): pass"), {}, set())
    found = seen(Some, globals(), set())
    assert found["pair"] == ("a", "b") and "__init__" in found


def test_a_tuple_in_a_table_stands_for_its_first() -> None:
    other = module_of("class Part: pass", "library.other")
    table = OrderedDict(plain=other.Part, packed=(other.Part, {"inplace": True}), empty=(), name="x", number=(1, 2))
    assert seen(table, {}, set()) == {"plain": other.Part, "packed": other.Part, "empty": ()}
    assert seen(table, {}, {"library.other"}) == {"empty": ()}


@pytest.mark.parametrize("holder", [1, "a", [], None])
def test_other_holders_are_refused(holder: Any) -> None:
    with pytest.raises(TypeError):
        _core.identities(holder)
    with pytest.raises(TypeError):
        _core.notable(holder, {}, set(), set())
