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
NOTHING: dict[str, Any] = {
    "own": {},
    "quiet": set(),
    "tops": frozenset(),
    "silent": SILENT,
    "only": None,
    "unsaid": set(),
    "lines": [],
}


def module_of(source: str, name: str = "library.part") -> types.ModuleType:
    module = types.ModuleType(name)
    exec(source, vars(module))
    return module


def seen(holder: Any, own: dict[str, Any], quiet: set[str], **others: Any) -> dict[Any, Any]:
    return dict(_core.notable(holder, **{**NOTHING, "own": own, "quiet": quiet, **others}))


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
    module.part = module_of("")
    assert _core.identities(module) == after


def test_identities_of_what_a_member_wraps() -> None:
    def inner(x: int = 1000, *, y: int = 2000) -> None:
        pass

    @functools.wraps(inner)
    def outer() -> None:
        pass

    class Some:
        by_class = classmethod(outer)
        asked = property(outer)

    alive = [[number] for number in range(6)]  # a value that is freed leaves its address to the next one
    for holder, (one, two, three) in ((outer, alive[:3]), (Some, alive[3:])):
        before = _core.identities(holder)
        inner.__defaults__ = (one,)  # type: ignore[assignment]
        assert _core.identities(holder) != before
        before = _core.identities(holder)
        inner.__kwdefaults__ = {"y": two}
        assert _core.identities(holder) != before
        before = _core.identities(holder)
        inner.__kwdefaults__["y"] = three
        assert _core.identities(holder) != before
        before = _core.identities(holder)
        inner.__kwdefaults__ = None  # type: ignore[assignment]
        assert _core.identities(holder) != before


def test_a_library_s_own_is_not_notable() -> None:
    other = module_of("def helper(): pass\nclass Part: pass", "library.other")
    module = module_of("import sys\nnumber = 1\ndef own(): pass\nclass Mine: pass\nnothing = None")
    module.helper, module.Part = other.helper, other.Part
    assert seen(module, vars(module), {"library.part", "library.other"}) == {}
    assert set(seen(module, vars(module), {"library.part"})) == {"helper", "Part"}
    assert set(seen(module, {}, set())) == {"own", "Mine", "helper", "Part"}


def test_packages_are_accepted_whole_and_their_modules_remembered() -> None:
    other = module_of("def helper(): pass\nclass Part: pass", "library.other")
    foreign = module_of("def strange(): pass\nclass Odd: pass", "librarian.other")
    module = module_of("")
    module.helper, module.Part, module.strange, module.Odd = other.helper, other.Part, foreign.strange, foreign.Odd
    quiet: set[str] = set()
    assert set(seen(module, vars(module), quiet, tops=frozenset({"library"}))) == {"strange", "Odd"}
    assert quiet == {"library.other"}


def test_what_may_run_other_code_is_notable() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise AssertionError("asked")

    module = module_of("def own(): pass")
    other = module_of("def inner(): pass\ndef outer(): pass\ndef endless(): pass", "library.other")
    foreign = module_of("def inner(): pass", "elsewhere.other")
    other.endless.__wrapped__ = other.endless
    module.usual = functools.wraps(other.inner)(other.outer)
    module.decorated = functools.wraps(foreign.inner)(module_of("def outer(): pass", "library.other").outer)
    module.endless = other.endless
    module.cached, module.foreign = functools.cache(other.inner), functools.cache(foreign.inner)
    module.partial = functools.partial(other.inner)
    module.Strange = Meta("Strange", (), {"__module__": "elsewhere"})
    module.Usual = Meta("Usual", (), {"__module__": "library.part"})
    module.instance = object()
    quiet = {"library.part", "library.other"}
    found = set(seen(module, vars(module), quiet))
    assert found == {"decorated", "endless", "foreign", "partial", "Strange", "instance"}
    assert set(seen(module, vars(module), quiet, only={functools.partial})) == found - {"instance", "foreign"}


def test_numbers_and_defaults_of_a_class_are_said() -> None:
    source = """
class Some:
    number, text, nothing, many, cache = 1, "a", None, [1], 7
    def plain(self): pass
    def usual(self, a=1, *, b="x"): pass
    def odd(self, a=()): pass
    def forward(self, a=1): pass
"""
    module = module_of(source)
    lines: list[str] = []
    found = seen(module.Some, vars(module), set(), lines=lines, unsaid={"forward", "cache"})
    assert {name for name in found if not name.startswith("__")} == {"many", "odd"}
    assert sorted(lines) == ["nothing=None", "number=1", "text='a'", "usual()=(1,)", "usual()={'b': 'x'}"]
    module.usual, module.number = module.Some.usual, 2
    assert seen(module, vars(module), {"library.part"}, lines=lines) == {} and len(lines) == 5


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
        _core.notable(holder, **NOTHING)
