# SPDX-License-Identifier: MIT
"""Where code lives, and whether this process runs what its file says.

Code under site-packages or the standard library is covered by versions. Any other module is the user's own: its
files are dependencies, and must be older than this process. There is no way to ask a module which bytes it was
compiled from (another process may have renewed its .pyc), so a file written after this process began may differ from
the code that runs here, and such a load is never cached.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import os
import site
import sys
import sysconfig
import time
import types
from collections.abc import Iterable
from typing import Any

TICK_NS = 20_000_000  # file times are taken from a clock that moves every 1-10 ms (HZ=100: 10 ms); twice that


def _process_start_ns() -> int:
    """Wall-clock time at which this process began, a tick early."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    since_boot = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot) - TICK_NS


# Taken once: a forked child runs what its parent imported, so the parent's start is the right one for it too.
PROCESS_START_NS = _process_start_ns()


@functools.cache
def _roots() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = [sysconfig.get_path(name) for name in names] + site.getsitepackages() + [site.getusersitepackages()]
    found.append(os.path.dirname(os.path.abspath(__file__)))  # Overmind's own format version is in every key
    both = {path for root in found if root for path in (root, os.path.realpath(root))}
    return tuple(sorted(path.rstrip("/") + "/" for path in both))


def installed_file(path: str) -> bool:
    """True for a file of the standard library or of an installed (not editable) package, also one that PYTHONPATH or a
    .pth file leads to, as the modules of a cluster do."""
    return path.startswith(_roots()) or in_packages(path)


def in_packages(path: str) -> bool:
    """True for a file of an installed package, but for one of the standard library."""
    return "/site-packages/" in path or "/dist-packages/" in path


def file_of(module: types.ModuleType) -> str | None:
    """The file that the module was read from; None for built-in and frozen ones, and namespace packages."""
    path = vars(module).get("__file__")
    return path if isinstance(path, str) else None


def installed(name: str) -> bool:
    """True for a module that is built in or lives under site-packages or the standard library."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return False
    path = file_of(module)
    if path is not None:
        return installed_file(path)
    spec = vars(module).get("__spec__")
    origin = getattr(spec, "origin", None)
    if origin in ("built-in", "frozen"):
        return True
    locations = getattr(spec, "submodule_search_locations", None)
    if locations is not None:
        return all(installed_file(place + "/") for place in list(locations))
    parent = name.rpartition(".")[0]  # made by a compiled parent: torch._C._nn
    return bool(parent) and installed(parent)


def named(module: str, qualname: str) -> Any:
    """What lies under this qualified name in a module that is imported, as its owner holds it; None if nothing does."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, (type, types.ModuleType)):
            return None
        found = vars(found).get(part)
    return found


def home(value: Any) -> str | None:
    """The module from which `value` (a class or function) can be had by its qualified name, or None.

    None for a notebook's own names, for local ones, and for a name that leads to another object by now.
    """
    name = getattr(value, "__module__", None)
    qualname = getattr(value, "__qualname__", None)
    if type(name) is not str or type(qualname) is not str or name == "__main__":
        return None
    found = named(name, qualname)
    while found is not value:  # a loader that Overmind has patched leads to the original
        inner = getattr(found, "__func__", None) if isinstance(found, (classmethod, staticmethod)) else None
        if inner is None and isinstance(found, types.FunctionType):
            inner = vars(found).get("__wrapped__")
        if inner is None:
            return None
        found = inner
    return name


def source_files(names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Module -> file, for the user's own modules among `names` and those that they use; and the packages they use.

    Followed are parent packages, what the import statements of a module's source name, wherever they stand, and
    whatever its globals hold: modules, and the homes of functions and classes. LookupError for a module that has no
    file.
    """
    found: dict[str, str] = {}
    packages: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if installed(name):
            packages.add(name.partition(".")[0])
            continue
        module = sys.modules.get(name)
        path = file_of(module) if module is not None and name != "__main__" else None
        if module is None or (path is None and not hasattr(module, "__path__")):
            raise LookupError(name)
        found[name] = path or ""  # a namespace package has no file
        parent = name.rpartition(".")[0]
        if parent:
            waiting.append(parent)
        waiting.extend(_used_by(module))
        if path is not None:
            waiting.extend(_imported_by(path, vars(module).get("__package__") or ""))
    return {name: path for name, path in found.items() if path}, packages


def _imported_by(path: str, package: str) -> set[str]:
    """Modules, of those that this process has, that the source at `path` imports: a value taken from one by
    `from settings import SCALE` leads nowhere by itself. Nothing for a source that can't be read or parsed."""
    try:
        found = _import_names(path, package, os.stat(path).st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return set()
    known = {name for name in found if type(sys.modules.get(name)) is types.ModuleType and name != "__main__"}
    return {name for name in known if file_of(sys.modules[name]) is not None or hasattr(sys.modules[name], "__path__")}


@functools.lru_cache(1024)
def _import_names(path: str, package: str, _mtime_ns: int) -> frozenset[str]:
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.add(origin)
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _used_by(module: types.ModuleType) -> set[str]:
    used: set[str] = set()
    for value in list(vars(module).values()):
        if isinstance(value, types.ModuleType):
            name = vars(value).get("__name__")
        elif isinstance(value, (type, types.FunctionType)):
            name = value.__module__
        else:
            continue
        found = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
        if found is not None and (file_of(found) is not None or hasattr(found, "__path__")):
            used.add(str(name))
    return used


def found_at(name: str) -> str | None:
    """The file of module `name`, or that of its top-level package if that isn't imported here yet."""
    module = sys.modules.get(name)
    if module is not None:
        return file_of(module)
    spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
    return None if spec is None else spec.origin
