# SPDX-License-Identifier: MIT
"""What a load read, and whether it is still the same.

A dependency is a JSON list that begins with a path, as it was opened (a link that is pointed elsewhere is seen):

    [path, dev, ino, size, mtime_ns, ctime_ns]               a file; stat follows links
    [path, "dir", mtime_ns, ctime_ns, digest]                 a folder's sorted names
    [path, "missing"]                                         looked for, and not there
    [path, "link", target]                                    a link that was read, or resolved
    [path, "code", module, dev, ino, size, mtime_ns, ctime_ns] the source of a user's module that the result uses

Racily clean files: a file written in the same tick of the file system's clock as our stat keeps its times if it is
written again. So nothing is recorded that was changed less than two ticks (20 ms) before the load began: such a load
is refused, and every later write moves ctime, which can't be set back. Not seen, as for every tool that trusts
stat: another process that writes a page of a shared mapping again, and clocks that are set back.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from overmind import _core, modules
from overmind.encoding import Uncacheable
from overmind.modules import TICK_NS

MAX_DEPENDENCIES = 2000


class Refused(Exception):  # noqa: N818
    """The files of a load can't be vouched for; str() is the reason."""


def changed(dependencies: Sequence[Sequence[Any]]) -> str | None:
    """None if everything is as it was recorded, else what changed. About 1.5 us for each; imports nothing."""
    for dependency in dependencies:
        kind = dependency[1]
        if kind.__class__ is int:
            reason = _file_changed(dependency[0], dependency[1:])
        elif kind == "dir":
            reason = _folder_changed(dependency)
        elif kind == "missing":
            reason = f"{dependency[0]} exists now" if os.path.exists(dependency[0]) else None
        elif kind == "link":
            reason = None if _target(dependency[0]) == dependency[2] else f"{dependency[0]} leads elsewhere now"
        else:
            reason = _code_changed(dependency)
        if reason is not None:
            return reason
    return None


def _file_changed(path: str, facts: Sequence[Any]) -> str | None:
    try:
        now = os.stat(path)
    except OSError as error:
        return f"{path} can't be read any more ({error.strerror})"
    size, mtime, ctime = facts[2:5]
    if now.st_ctime_ns == ctime and now.st_mtime_ns == mtime and now.st_size == size:
        if now.st_ino == facts[1] and now.st_dev == facts[0]:
            return None
        return f"{path} is another file now"
    return f"{path} changed"


def _folder_changed(dependency: Sequence[Any]) -> str | None:
    path, _kind, mtime, ctime, digest = dependency
    try:
        now = os.stat(path)
        if now.st_mtime_ns == mtime and now.st_ctime_ns == ctime:
            return None
        return None if _digest(os.listdir(path)) == digest else f"the files in {path} changed"
    except OSError as error:
        return f"{path} can't be read any more ({error.strerror})"


def _target(path: str) -> str | None:
    """What a link says, and where it leads in the end; None for what is no link."""
    try:
        return f"{os.readlink(path)}\0{os.path.realpath(path)}"
    except (OSError, ValueError):
        return None


def _code_changed(dependency: Sequence[Any]) -> str | None:
    path, _kind, name = dependency[:3]
    reason = _file_changed(path, dependency[3:])
    if reason is not None:
        return reason
    if dependency[7] >= modules.PROCESS_START_NS or dependency[6] >= modules.PROCESS_START_NS:
        return f"the source of {name} changed since this kernel started, or just before ({path})"
    here = modules.found_at(name)
    expected = path if name in sys.modules else None
    if here is None or (expected is not None and not _same(here, expected)):
        return f"module {name} is {here or 'nowhere'} here, and was {path}"
    if expected is None and not _leads_to(here, name, path):
        return f"module {name} would not be imported from {path} here"
    return None


def _same(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _leads_to(top: str, name: str, path: str) -> bool:
    """True if module `name` at `path` belongs to the package or module whose file is `top`."""
    if "." not in name:
        return _same(top, path)
    return os.path.realpath(path).startswith(os.path.dirname(os.path.realpath(top)) + "/")


def _digest(names: list[str]) -> str:
    joined = b"\0".join(os.fsencode(name) for name in sorted(names))
    return hashlib.sha1(joined, usedforsecurity=False).hexdigest()


def of_file(path: str, before_ns: int | None = None) -> list[Any]:
    """The dependency on one path as it is now. Refused if it changed after `before_ns` less two ticks."""
    try:
        now = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return [path, "missing"]
    except OSError as error:
        raise Refused(f"{path} can't be read after the load ({error.strerror})") from None
    _settled(path, now, before_ns)
    if stat.S_ISDIR(now.st_mode):
        return _of_folder(path, now)
    if not stat.S_ISREG(now.st_mode):
        raise Refused(f"{path} is not a plain file: what it gives may differ at every read")
    return [path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def _of_folder(path: str, now: os.stat_result) -> list[Any]:
    try:
        digest = _digest(os.listdir(path))
    except OSError as error:
        raise Refused(f"{path} can't be listed after the load ({error.strerror})") from None
    return [path, "dir", now.st_mtime_ns, now.st_ctime_ns, digest]


def _settled(path: str, now: os.stat_result, before_ns: int | None) -> None:
    """mtime may be set to anything; ctime may not, and moves with every write."""
    if before_ns is not None and now.st_ctime_ns >= before_ns - TICK_NS:
        what = "folder" if stat.S_ISDIR(now.st_mode) else "file"
        raise Refused(f"{what} {path} changed while it was loaded, or just before")


def of_tree(folder: str, before_ns: int | None) -> list[list[Any]]:
    """A folder and its direct files: a loader also asks which of them exist, which opens nothing."""
    found = [of_file(folder, before_ns)]
    if found[0][1] != "dir":
        return found
    with os.scandir(folder) as entries:
        names = sorted(entry.path for entry in entries if not entry.is_dir())
    if len(names) > MAX_DEPENDENCIES:
        raise Refused(f"{folder} holds {len(names)} files, too many to watch")
    for name in names:
        if os.path.exists(name) and not stat.S_ISREG(os.stat(name).st_mode):
            continue  # a socket or pipe beside the files; its name is in the listing
        found.append(of_file(name, before_ns))
    return found


def of_classes(names: Iterable[str]) -> list[list[Any]]:
    """Dependencies on the code of modules that a skeleton refers to. Uncacheable if it may differ from the file's.

    An installed package is known by its version, and by its __init__ (an upgrade in place renews it). Any other
    module's source, and what it uses of the user's own modules, must be older than this process.
    """
    own = set()
    tops = set()
    for name in names:
        if name == "__main__":
            raise Uncacheable("the result holds a class or function of the notebook itself")
        if modules.installed(name):
            tops.add(name.partition(".")[0])
        else:
            own.add(name)
    try:
        files, packages = modules.source_files(own)
    except LookupError as error:
        raise Uncacheable(f"module {error.args[0]} has no source file to watch") from None
    return [*_of_packages(tops | packages), *(of_source(name, path) for name, path in sorted(files.items()))]


def _of_packages(tops: set[str]) -> list[list[Any]]:
    found = []
    for top in sorted(tops):
        module = sys.modules.get(top)
        path = modules.file_of(module) if module is not None else None
        if path is not None and modules.in_packages(path):
            found.append(of_file(path))
    return found


def of_source(name: str, path: str) -> list[Any]:
    """The dependency on a user's own module. Uncacheable if this process may run older code than the file shows."""
    try:
        now = os.stat(path)
    except OSError:
        raise Uncacheable(f"the source of {name} is gone ({path})") from None
    if max(now.st_ctime_ns, now.st_mtime_ns) >= modules.PROCESS_START_NS:
        raise Uncacheable(f"the source of {name} changed since this kernel started, or just before ({path})")
    return [path, "code", name, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]


class Opened:
    """Turns the paths that a load opened into dependencies. One use.

    `folders`: the target's folder, the hub's snapshot, folders that arguments name. Of those, and of every folder
    below them in which the load opened a file, all direct files count. `files`: files that arguments name.
    """

    def __init__(self, start_ns: int, folders: Sequence[str], files: Sequence[str], generic: bool) -> None:
        self._start = start_ns
        self._folders = [os.path.abspath(folder) for folder in folders]
        self._roots = tuple({os.path.realpath(path).rstrip("/") + "/" for path in self._folders})
        self._files = files
        self._generic = generic
        self._found: dict[str, list[Any]] = {}
        self._trees: set[str] = set()

    def collect(self, events: Iterable[tuple[str, str, str]]) -> list[list[Any]]:
        """Refused if a file changed during the load, or the load wrote a file that is still there."""
        reads: dict[str, None] = {}
        wrote: set[str] = set()
        links: set[str] = set()
        for event, path, mode in _of_others(events):
            if event == "open" and any(letter in mode for letter in "wax+"):
                wrote.add(path)
            elif event == "link":
                links.update(_links_of(path))
            elif event == "open" or not self._is_import(path):
                reads[path] = None
        for path in sorted(wrote):
            # A folder opened for writing is a file without a name in it (tempfile.TemporaryFile).
            if not _ignored_write(path) and os.path.lexists(path) and not os.path.isdir(path):
                raise Refused(f"it wrote {path}, and a hit would not")
        for folder in self._folders:
            self._tree(folder)
        for path in map(os.path.abspath, self._files):  # what the call names counts, wherever it lies
            if path not in wrote:
                self._path(path)
        for path in reads:
            if path not in wrote and not _ignored(path):
                self._path(path)
        self._read_links(links)
        _refuse_mapped(self._found.values())
        return list(self._found.values())

    def _is_import(self, path: str) -> bool:
        """A listing that the import system makes of its own folders; a loader of a library has no other there."""
        if path not in sys.path_importer_cache:
            return False
        return modules.installed_file(path + "/") or not (self._generic or self._below(path))

    def _below(self, folder: str) -> bool:
        return f"{os.path.realpath(folder)}/".startswith(self._roots) if self._roots else False

    def _path(self, path: str) -> None:
        if path in self._found:
            return
        if os.path.isdir(path):
            self._add(of_file(path, self._start))
            return
        self._add(of_file(path, self._start))
        folder = os.path.dirname(path)
        if folder not in self._trees and self._below(folder) and os.path.isdir(folder):
            self._tree(folder)

    def _read_links(self, links: Iterable[str]) -> None:
        for path in sorted(links):
            if not _ignored(path):
                _settled(path, os.lstat(path), self._start)
                self._add([path, "link", _target(path)], f"link {path}")

    def _tree(self, folder: str) -> None:
        if folder not in self._trees:
            self._trees.add(folder)
            for dependency in of_tree(folder, self._start):
                self._add(dependency)

    def _add(self, dependency: list[Any], name: str = "") -> None:
        self._found.setdefault(name or dependency[0], dependency)
        if len(self._found) > MAX_DEPENDENCIES:
            raise Refused(f"it read more than {MAX_DEPENDENCIES} files")


def _refuse_mapped(found: Iterable[list[Any]]) -> None:
    """A page that was written through a shared mapping may be written again, and the file keeps its times."""
    mapped = set(_core.files_mapped_for_writing())
    for dependency in found:
        if tuple(dependency[1:3]) in mapped:
            raise Refused(f"{dependency[0]} is mapped for writing in this process: its times don't tell of each write")


def _of_others(events: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Without what Overmind itself does in its own folder meanwhile, on any thread: its log, its history, its locks,
    what zygotes have learned."""
    folder = _core.config().instance_dir
    inside = f"{folder}/"
    return (event for event in events if event[1] != folder and not event[1].startswith(inside))


def _links_of(path: str) -> Iterator[str]:
    """The links on the way to a path: whoever resolves it as a whole reads each of them."""
    while len(path) > 1:
        if os.path.islink(path):
            yield path
        path = os.path.dirname(path)


_CODE = (".py", ".pyc", ".so", ".pth")


def _ignored(path: str) -> bool:
    """Installed code (its versions are in the key), kernel files, and locks of the hub."""
    if _ignored_write(path):
        return True
    if not modules.installed_file(path):
        return False
    return path.endswith(_CODE) or ".dist-info" in path or ".egg-info" in path or os.path.isdir(path)


def _ignored_write(path: str) -> bool:
    return _is_kernels(path) or _is_lock(path) or _is_bytecode(path)


def _is_kernels(path: str) -> bool:
    """A device, or a file of /proc or /sys. Not what lies in /dev/shm, nor what a link of /proc leads to elsewhere."""
    kernels = ("/proc/", "/sys/", "/dev/")
    if not path.startswith(kernels):
        return False
    place = os.path.realpath(path)
    return f"{place}/".startswith(kernels) and not place.startswith("/dev/shm/")


def _is_lock(path: str) -> bool:
    """Locks hold nothing."""
    return path.endswith(".lock") and not (os.path.isfile(path) and os.path.getsize(path))


def _is_bytecode(path: str) -> bool:
    """Of Python's own, also while it is written under another name: the source it was made from is what counts."""
    folder, name = os.path.split(path)
    return folder.endswith("/__pycache__") and ".pyc" in name
