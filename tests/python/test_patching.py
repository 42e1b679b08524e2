# SPDX-License-Identifier: MIT
"""Patches that leave nothing behind, and hooks that see every import. Real modules, written to a temporary folder."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from overmind.loader import Loader
from overmind.patching import ImportHooks, MissingTargetError, PatchSet

LOADER = Loader(name="library.load", target="path")

LIBRARY = '''
class Base:
    """A base."""
    @classmethod
    def from_pretrained(cls, path: str, *args, config: dict | None = None, **kwargs) -> "Base":
        """Loads."""
        made = cls()
        made.got = (path, args, config, kwargs)
        return made
    @staticmethod
    def shared(path, scale=2):
        return (path, scale)

class Child(Base):
    @classmethod
    def from_pretrained(cls, path, **kwargs):
        made = super().from_pretrained(path, **kwargs)
        made.child = True
        return made

def load(path, *, device="cpu"):
    """Loads from a path."""
    return ("native", path, device)

NOTHING = 3
'''


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """write(name, source): a module that can be imported in this test only."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []
    before = list(sys.meta_path)

    def add(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        made.append(name)

    yield add
    for name in made:
        sys.modules.pop(name, None)
    assert sys.meta_path == before, "a finder is left"


@pytest.fixture
def library(write: Callable[[str, str], None]) -> types.ModuleType:
    write("ov_library", LIBRARY)
    return importlib.import_module("ov_library")


class Seen:
    """A stand-in for load.call that notes the calls and makes them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, type | None, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, loader: Loader, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: Any) -> Any:
        self.calls.append((loader.name, owner, args, kwargs))
        return function(*args, **kwargs)


@pytest.fixture
def seen() -> Seen:
    return Seen()


# --- wrappers -----------------------------------------------------------------------------------


def test_a_wrapped_function_looks_like_the_original(library: types.ModuleType, seen: Seen) -> None:
    original = library.load
    signature = inspect.signature(original)
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "load", LOADER)

    assert library.load is not original
    assert library.load.__wrapped__ is original
    assert inspect.signature(library.load) == signature
    for name in ("__doc__", "__name__", "__qualname__", "__module__", "__annotations__"):
        assert getattr(library.load, name) == getattr(original, name)
    assert library.load("p", device="x") == ("native", "p", "x")
    assert seen.calls == [("library.load", None, ("p",), {"device": "x"})]
    patches.undo()


def test_a_wrapped_classmethod_is_one_and_binds_the_class_it_was_called_on(
    library: types.ModuleType, seen: Seen
) -> None:
    signature = inspect.signature(library.Base.from_pretrained)
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "Base.from_pretrained", LOADER)

    assert isinstance(vars(library.Base)["from_pretrained"], classmethod)
    assert inspect.signature(library.Base.from_pretrained) == signature
    assert inspect.ismethod(library.Base.from_pretrained)

    class User(library.Base):  # type: ignore[misc,name-defined]
        pass

    made = User.from_pretrained("p", 1, config={"a": 2}, loader="l", owner="o")
    assert type(made) is User
    assert made.got == ("p", (1,), {"a": 2}, {"loader": "l", "owner": "o"})
    assert seen.calls == [("library.load", User, ("p", 1), {"config": {"a": 2}, "loader": "l", "owner": "o"})]
    patches.undo()


def test_an_override_reaches_the_wrapper_through_super(library: types.ModuleType, seen: Seen) -> None:
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "Base.from_pretrained", LOADER)
    assert library.Child.from_pretrained("p").child
    assert [call[1] for call in seen.calls] == [library.Child]
    patches.undo()


def test_a_static_method_stays_static(library: types.ModuleType, seen: Seen) -> None:
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "Base.shared", LOADER)
    assert isinstance(vars(library.Base)["shared"], staticmethod)
    assert library.Base().shared("p", scale=3) == ("p", 3)
    assert seen.calls[0][1] is None
    patches.undo()


def test_undo_restores_the_very_objects_and_may_be_repeated(library: types.ModuleType, seen: Seen) -> None:
    before = {**vars(library)}, {**vars(library.Base)}
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "load", LOADER)
    patches.wrap(library, "Base.from_pretrained", LOADER)
    patches.wrap(library, "load", LOADER)  # twice: the undo must come back to the first
    patches.undo()
    patches.undo()
    assert {**vars(library)} == before[0]
    after = {**vars(library.Base)}
    assert all(after[name] is value for name, value in before[1].items() if name in ("from_pretrained", "shared"))
    assert patches.changes == ()


def test_what_somebody_patched_over_us_survives_the_undo(library: types.ModuleType, seen: Seen) -> None:
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "load", LOADER)
    ours = library.load

    def theirs(path: str) -> Any:
        return ("theirs", ours(path))

    library.load = theirs
    patches.undo()
    assert library.load is theirs
    assert library.load("p") == ("theirs", ("native", "p", "cpu"))
    assert seen.calls == []


def test_copies_of_a_wrapper_are_the_original_after_the_undo(library: types.ModuleType, seen: Seen) -> None:
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "load", LOADER)
    patches.wrap(library, "Base.from_pretrained", LOADER)
    imported = [library.load]
    function = library.Base.from_pretrained.__func__
    copied = types.FunctionType(function.__code__, function.__globals__, "copy", None, function.__closure__)
    library.Copy = type("Copy", (), {"from_pretrained": classmethod(copied)})
    assert library.Copy.from_pretrained("p").got[0] == "p"
    assert len(seen.calls) == 1
    patches.undo()
    assert imported[0]("p") == ("native", "p", "cpu")
    assert library.Copy.from_pretrained("p").got[0] == "p"
    assert len(seen.calls) == 1


@pytest.mark.parametrize("path", ["gone", "Gone.from_pretrained", "Child.shared", "NOTHING", "Base", "NOTHING.load"])
def test_a_target_that_is_not_there(
    library: types.ModuleType, seen: Seen, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {**vars(library)}
    with pytest.raises(MissingTargetError):
        PatchSet(seen, strict=True).wrap(library, path, LOADER)
    monkeypatch.setattr(logging.getLogger("overmind"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="overmind"):
        PatchSet(seen).wrap(library, path, LOADER)
    assert "native" in caplog.text
    assert {**vars(library)} == before


def test_an_import_that_ends_after_the_undo_patches_nothing(library: types.ModuleType, seen: Seen) -> None:
    patches = PatchSet(seen, strict=True)
    patches.undo()
    original = library.load
    patches.wrap(library, "load", LOADER)
    assert library.load is original


def test_other_references_are_replaced_and_restored(library: types.ModuleType, seen: Seen) -> None:
    package = types.ModuleType("package")
    package.load = library.load  # type: ignore[attr-defined]
    other = types.ModuleType("other")
    other.load = "something else"  # type: ignore[attr-defined]
    original = library.load
    patches = PatchSet(seen, strict=True)
    patches.wrap(library, "load", LOADER)
    for module in (package, other):
        patches.share(module, "load", original, library.load)
    assert vars(package)["load"] is library.load
    assert vars(other)["load"] == "something else"
    later = types.ModuleType("later")
    later.renamed = library.load  # type: ignore[attr-defined]
    patches.undo()
    assert vars(package)["load"] is original
    assert vars(later)["renamed"] is original
    assert vars(other)["load"] == "something else"


# --- import hooks -------------------------------------------------------------------------------


@pytest.fixture
def hooks() -> Iterator[ImportHooks]:
    made = ImportHooks()
    yield made
    made.remove()


def test_a_hook_runs_once_after_the_module_is_complete(write: Callable[[str, str], None], hooks: ImportHooks) -> None:
    write("ov_later", "import json\nvalue = 1\nvalue = 2\n")
    runs: list[int] = []
    hooks.add("ov_later", lambda module: runs.append(module.value))
    assert runs == []
    assert hooks in sys.meta_path
    module = importlib.import_module("ov_later")
    assert runs == [2]
    assert hooks not in sys.meta_path, "nothing is awaited: the finder must go"
    importlib.reload(module)
    assert runs == [2]


def test_the_module_keeps_the_spec_and_loader_it_has_without_us(
    write: Callable[[str, str], None], hooks: ImportHooks
) -> None:
    write("ov_plain", "value = 1\n")
    plain = importlib.import_module("ov_plain")
    del sys.modules["ov_plain"]
    hooks.add("ov_plain", lambda module: None)
    hooked = importlib.import_module("ov_plain")
    assert type(hooked.__loader__) is type(plain.__loader__)
    assert hooked.__spec__ is not None and plain.__spec__ is not None
    assert hooked.__spec__.loader is hooked.__loader__
    assert vars(hooked.__loader__) == vars(plain.__loader__)
    assert hooked.__spec__.origin == plain.__spec__.origin
    assert hooked.__spec__.cached == plain.__spec__.cached
    assert inspect.getsource(hooked) == inspect.getsource(plain)


def test_a_module_that_is_there_already_is_served_at_once(
    write: Callable[[str, str], None], hooks: ImportHooks
) -> None:
    write("ov_early", "value = 1\n")
    importlib.import_module("ov_early")
    runs: list[str] = []
    hooks.add("ov_early", lambda module: runs.append(module.__name__))
    assert runs == ["ov_early"]
    assert hooks not in sys.meta_path


def test_asking_whether_a_module_exists_is_no_import(write: Callable[[str, str], None], hooks: ImportHooks) -> None:
    write("ov_asked", "value = 1\n")
    runs: list[str] = []
    hooks.add("ov_asked", lambda module: runs.append(module.__name__))
    assert importlib.util.find_spec("ov_asked") is not None
    assert importlib.util.find_spec("ov_absent_entirely") is None
    assert runs == []
    importlib.import_module("ov_asked")
    assert runs == ["ov_asked"]


def test_a_lazy_module_is_served_when_it_is_really_executed(
    write: Callable[[str, str], None], hooks: ImportHooks
) -> None:
    write("ov_lazy", "value = 1\n")
    runs: list[str] = []
    hooks.add("ov_lazy", lambda module: runs.append(module.__name__))
    spec = importlib.util.find_spec("ov_lazy")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ov_lazy"] = module
    spec.loader.exec_module(module)
    hooks.catch_up()
    assert runs == []
    assert module.value == 1
    assert runs == ["ov_lazy"]


def test_a_module_that_fails_is_awaited_still(write: Callable[[str, str], None], hooks: ImportHooks) -> None:
    write("ov_fails", "import sys\nif not hasattr(sys, 'ov_ready'): raise ValueError('not yet')\nvalue = 1\n")
    runs: list[str] = []
    hooks.add("ov_fails", lambda module: runs.append(module.__name__))
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module("ov_fails")
    assert runs == []
    sys.ov_ready = True  # type: ignore[attr-defined]
    try:
        importlib.import_module("ov_fails")
    finally:
        del sys.ov_ready  # type: ignore[attr-defined]
    assert runs == ["ov_fails"]


def test_a_hook_that_raises_does_not_break_the_import(
    write: Callable[[str, str], None],
    hooks: ImportHooks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("ov_hook", "value = 1\n")
    monkeypatch.setattr(logging.getLogger("overmind"), "propagate", True)
    hooks.add("ov_hook", lambda module: module.gone)
    assert importlib.import_module("ov_hook").value == 1
    assert "ov_hook" in caplog.text


def test_a_module_that_replaces_itself(write: Callable[[str, str], None], hooks: ImportHooks) -> None:
    """transformers does: the hook gets what is in sys.modules."""
    write(
        "ov_replaces",
        """
        import sys, types
        new = types.ModuleType(__name__); new.value = "new"; new.__spec__ = __spec__
        sys.modules[__name__] = new
        """,
    )
    runs: list[str] = []
    hooks.add("ov_replaces", lambda module: runs.append(module.value))
    importlib.import_module("ov_replaces")
    assert runs == ["new"]


def test_hooks_of_one_import_inside_another(write: Callable[[str, str], None], hooks: ImportHooks) -> None:
    write("ov_outer", "import ov_inner\nvalue = ov_inner.value\n")
    write("ov_inner", "value = 1\n")
    order: list[str] = []
    hooks.add("ov_outer", lambda module: order.append("outer"))
    hooks.add("ov_inner", lambda module: order.append("inner"))
    importlib.import_module("ov_outer")
    assert order == ["inner", "outer"]


def test_a_module_that_came_in_past_the_finder_is_caught_up(
    write: Callable[[str, str], None], hooks: ImportHooks
) -> None:
    write("ov_past", "value = 1\n")
    runs: list[str] = []
    hooks.add("ov_past", lambda module: runs.append(module.__name__))
    sys.meta_path.remove(hooks)  # type: ignore[arg-type]
    importlib.import_module("ov_past")
    assert runs == []
    hooks.catch_up()
    assert runs == ["ov_past"]


def test_eight_threads_that_import_at_once(write: Callable[[str, str], None], hooks: ImportHooks) -> None:
    write("ov_threads", "import ov_slow\nvalue = 1\n")
    write("ov_slow", "sum(range(200_000))\n")
    runs: list[str] = []
    hooks.add("ov_threads", lambda module: runs.append(module.__name__))
    gate = threading.Barrier(8)

    def work() -> None:
        gate.wait(10)
        importlib.import_module("ov_threads")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert runs == ["ov_threads"]


def test_removed_hooks_never_run(write: Callable[[str, str], None], hooks: ImportHooks) -> None:
    write("ov_removed", "value = 1\n")
    runs: list[str] = []
    hooks.add("ov_removed", lambda module: runs.append(module.__name__))
    spec = importlib.util.find_spec("ov_removed")  # an import that is on its way
    hooks.remove()
    hooks.remove()
    assert hooks not in sys.meta_path
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    importlib.import_module("ov_removed")
    assert runs == []


def test_a_builtin_module_has_a_loader_that_cannot_be_watched(hooks: ImportHooks) -> None:
    """The import works; the hook waits for catch_up."""
    name = next(name for name in ("_md5", "_statistics", "xxsubtype", "faulthandler") if _fresh_builtin(name))
    before = sys.modules.pop(name, None)
    try:
        runs: list[str] = []
        hooks.add(name, lambda module: runs.append(module.__name__))
        assert importlib.import_module(name).__name__ == name
        hooks.catch_up()
        assert runs == [name]
    finally:
        if before is not None:
            sys.modules[name] = before


def _fresh_builtin(name: str) -> bool:
    return name in sys.builtin_module_names
