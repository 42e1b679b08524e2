# SPDX-License-Identifier: MIT
"""Checks what Overmind needs of this machine, and says what to do about what is missing.

Every check really tries the thing (it creates a memfd, seals it, maps it) where that is cheap, rather than reading a
version number. Nothing is started or changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from overmind import _core, display

Verdict = Literal["ok", "note", "wrong"]

_GIB = 1 << 30
_MADV_POPULATE_READ = 22
_LIBRARIES = ("torch", "transformers", "diffusers", "safetensors", "tokenizers", "huggingface-hub", "pyzmq", "rich")


@dataclass(frozen=True)
class Check:
    """One thing looked at. `note`: it works, but worse than it could; `wrong`: something does not work."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """All checks, in the order in which a person should read them. A check that fails itself is `wrong`."""
    found: list[Check] = []
    for check in _CHECKS:
        try:
            found += check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            found.append(Check(name, "wrong", f"{type(error).__name__}: {error}", "Please report this."))
    return found


def healthy(checks: list[Check]) -> bool:
    """Whether nothing is wrong."""
    return all(check.verdict != "wrong" for check in checks)


def as_json(checks: list[Check]) -> dict[str, Any]:
    """The checks as a JSON-able value."""
    return {"healthy": healthy(checks), "checks": [asdict(check) for check in checks]}


def text(checks: list[Check]) -> str:
    """The checks as people read them."""
    marks = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}
    lines = []
    for check in checks:
        lines.append(display.clean(f"{marks[check.verdict]}  {check.name}: {check.found}"))
        if check.advice:
            lines.append(display.clean(f"       -> {check.advice}"))
    return "\n".join(lines)


# --- the system ---------------------------------------------------------------------------------


def _kernel() -> Iterator[Check]:
    release = platform.release()
    if sys.platform != "linux":
        yield Check("system", "wrong", sys.platform, "Overmind needs Linux; loads are native here.")
        return
    yield Check("kernel", "ok", release)
    yield _memfd()
    libc = ctypes.CDLL(None, use_errno=True)
    close_range = hasattr(libc, "close_range") and libc.close_range(0xFFFFFFF0, 0xFFFFFFFF, 0) == 0
    yield Check(
        "close_range",
        "ok" if close_range else "note",
        "available" if close_range else "not available",
        "" if close_range else "Descriptors are closed one by one, which is slower: Linux 5.9 has the call.",
    )
    yield _populate()


def _memfd() -> Check:
    advice = "Loads are native: memfd_create needs Linux 3.17 and a sandbox (seccomp) that allows it."
    try:
        descriptor = os.memfd_create("overmind-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Check("memfd", "wrong", f"can't be created: {error.strerror}", advice)
    try:
        os.write(descriptor, b"overmind")
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with mmap.mmap(descriptor, 8, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            mapped[:8] = b"own copy"
        return Check("memfd", "ok", "can be created, sealed and mapped")
    except OSError as error:
        return Check("memfd", "wrong", f"can't be sealed and mapped: {error.strerror}", advice)
    finally:
        os.close(descriptor)


def _populate() -> Check:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_READ)
        except (OSError, ValueError):
            advice = "The first read of each page costs a fault: Linux 5.14 has the call."
            return Check("MADV_POPULATE_READ", "note", "not available", advice)
    return Check("MADV_POPULATE_READ", "ok", "available")


def _limits() -> Iterator[Check]:
    _soft, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < 4096
    most = max(1, files // 2 - 12)  # core/server.cc: limits_of()
    advice = f"A daemon started here keeps {most} entries at most: raise it, then `overmind stop`." if few else ""
    yield Check("open files (ulimit -Hn)", "note" if few else "ok", _limit(files), advice)
    for name, which, option in (
        ("address space", resource.RLIMIT_AS, "-v"),
        ("file size", resource.RLIMIT_FSIZE, "-f"),
    ):
        soft, _hard = resource.getrlimit(which)
        set_ = soft != resource.RLIM_INFINITY
        advice = f"Results larger than this are loaded natively: `ulimit {option} unlimited` lifts it." if set_ else ""
        yield Check(f"{name} (ulimit {option})", "note" if set_ else "ok", _limit(soft, bytes_=True), advice)


def _limit(value: int, bytes_: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return display.size(value) if bytes_ else str(value)


def _memory() -> Iterator[Check]:
    limit = _cgroup_limit()
    available = _available()
    found = f"{display.size(available)} available"
    if limit is not None:
        found += f", this cgroup is limited to {display.size(limit)}"
    tight = min(available, limit if limit is not None else available) < 2 * _GIB
    advice = (
        "Large results won't fit: free memory, or raise the cgroup's limit. Entries count against it." if tight else ""
    )
    yield Check("memory", "note" if tight else "ok", found, advice)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_limit() -> int | None:
    """The smallest memory limit between this process's cgroup and the root; v2, else v1. None: no limit."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for where in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((where / name).read_text()))
            if where == root:
                break
    real = [limit for limit in limits if limit < 1 << 60]  # v1 says "no limit" with a huge number
    return min(real) if real else None


# --- the daemon ---------------------------------------------------------------------------------


def _configuration() -> Iterator[Check]:
    try:
        settings = _core.config()
    except _core.OvermindError as error:
        yield Check("settings", "wrong", str(error), "Correct or unset that variable.")
        return
    if settings.disabled:
        yield Check("settings", "wrong", "OVERMIND_DISABLE is set: loads are native", "Unset it to use the cache.")
    else:
        yield Check("settings", "ok", f"budget {settings.budget}, log level {settings.log_level}")
    yield _folder(Path(settings.runtime_dir))


def _folder(path: Path) -> Check:
    name = "runtime folder"
    elsewhere = "Remove it, or set OVERMIND_RUNTIME_DIR to a folder of your own."
    try:
        found = path.lstat()
    except FileNotFoundError:
        return _folder_to_be(path)
    except OSError as error:
        return Check(name, "wrong", f"{path}: {error.strerror}", elsewhere)
    if stat.S_ISLNK(found.st_mode):
        return Check(name, "wrong", f"{path} is a symbolic link, which is not followed", elsewhere)
    if not stat.S_ISDIR(found.st_mode):
        return Check(name, "wrong", f"{path} is no folder", elsewhere)
    if found.st_uid != os.getuid():
        return Check(name, "wrong", f"{path} belongs to user {found.st_uid}, not to you ({os.getuid()})", elsewhere)
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        return Check(name, "wrong", f"{path} is open to others (mode {mode:o})", f"Close it: chmod 700 {path}")
    if not os.access(path, os.W_OK | os.X_OK):
        return Check(name, "wrong", f"{path} can't be written", f"Allow it: chmod 700 {path}")
    if _is_full(path):
        advice = "Make room there, or set OVERMIND_RUNTIME_DIR to another folder: until then all starts are plain."
        return Check(name, "wrong", f"{path} is on a disk that is full", advice)
    return Check(name, "ok", str(path))


def _is_full(path: Path) -> bool:
    """Locks, profiles and logs are small; without room for those nothing is kept."""
    space = os.statvfs(path)
    no_files = space.f_files > 0 and space.f_favail < 16
    return no_files or space.f_bavail * space.f_frsize < 64 << 10


def _folder_to_be(path: Path) -> Check:
    above = path.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if os.access(above, os.W_OK | os.X_OK):
        return Check("runtime folder", "ok", f"{path} (made at the first load)")
    advice = "Set OVERMIND_RUNTIME_DIR to a folder that you can write."
    return Check("runtime folder", "wrong", f"{path} can't be made: {above} can't be written", advice)


def _daemon() -> Iterator[Check]:
    from overmind import store

    try:
        settings = store.config()
    except _core.OvermindError:
        return  # said under "settings"
    program = settings.daemon_path
    if not os.access(program, os.X_OK):
        yield Check("daemon", "wrong", f"{program} can't be executed", "Reinstall overmind-jupyter.")
        return
    try:
        connection = _core.Client(settings)
        connection.connect(start=False)
        figures = connection.stats()
    except _core.UnavailableError:
        yield Check("daemon", "ok", "not running; the first load starts it")
        return
    except _core.OvermindError as error:
        yield Check("daemon", "wrong", str(error), f"Look into {settings.log_path}; `overmind stop` ends it.")
        return
    same = figures["version"] == _core.__version__
    advice = "" if same else f"This process has {_core.__version__}: `overmind stop`, then load again."
    found = f"process {figures['daemon_pid']}, version {figures['version']}, {figures['entries']} entries"
    yield Check("daemon", "ok" if same else "wrong", found, advice)


# --- libraries ----------------------------------------------------------------------------------


def _torch() -> Iterator[Check]:
    """Compares without importing torch, which takes seconds."""
    name = "torch"
    version = _version("torch")
    if version is None:
        yield Check(name, "note", "not installed", "Only loads without tensors can be cached.")
        return
    built = _built_for()
    if built is None:
        advice = "Loads are correct but slower: reinstall overmind-jupyter with this torch installed."
        yield Check(name, "note", f"{version}; the fast path is not there", advice)
    elif built.split("+")[0] != version.split("+")[0]:
        advice = f"Loads are correct but slower: reinstall overmind-jupyter, or torch {built}."
        yield Check(name, "note", f"{version}, but the fast path was built for {built}", advice)
    else:
        yield Check(name, "ok", f"{version}, the fast path was built for it")


def _built_for() -> str | None:
    """TORCH_VERSION of overmind._torch. It is linked to libtorch, so torch comes first; None if it can't be loaded."""
    if importlib.util.find_spec("overmind._torch") is None:
        return None
    try:
        import torch  # noqa: F401

        from overmind import _torch
    except Exception:
        return None
    return _torch.TORCH_VERSION


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Check]:
    installed = [f"{name} {version}" for name in _LIBRARIES if (version := _version(name)) is not None]
    yield Check("libraries", "ok", f"Python {platform.python_version()}, {', '.join(installed)}")
    if _version("pyzmq") is None:
        yield Check("pyzmq", "note", "not installed", "`overmind monitor` needs it: pip install pyzmq")


_CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _kernel,
    _limits,
    _memory,
    _configuration,
    _daemon,
    _torch,
    _versions,
)
