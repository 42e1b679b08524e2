# SPDX-License-Identifier: MIT
"""The zygote: imports, then one loop that answers launchers. One thread, and no code of a program ever runs in it.

States: loading -> waiting (one standby is ready) -> retired. It retires when something that it imported has changed,
when it was not asked for long, when memory is short or others need its place; programs that were forked live on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NoReturn

from overmind import store
from overmind.zygote import become, preload, profile, stash, wire
from overmind.zygote.census import ASKED_TO_GO, Census
from overmind.zygote.engines import ENGINES, Engine, has_options

_PEER = struct.Struct("3i")
# New modules to import: 2 s, as long as a launcher waits. With more, starts that come meanwhile are plain at once.
MANY = 100
_TICK = 1.0  # seconds between looks at the profile, the socket and the memory
_SETTLE = 0.3  # seconds after a start until the next standby is made: the program's own start comes first
IDLE_EXIT = 4 * 3600.0  # seconds without a start


_CHANGED = "the program changes "


class RetireError(Exception):
    """This zygote is of no use any more; its text says why."""


def run(words: list[str], native: frozenset[str], at_end: list[Callable[[], None]]) -> NoReturn:
    """`SOCKET PROFILE LOCK_FD MODE TARGET [PID:FD]...`; the last are programs forked before an exec of this zygote.

    Raises become.Leave in a fork; exits otherwise."""
    Zygote(words, native, at_end).serve()


class Zygote:
    def __init__(self, words: list[str], native: frozenset[str], at_end: list[Callable[[], None]]) -> None:
        self._words = words
        self.at_end = at_end
        self._socket_path, self._profile_path, lock, self._mode, self._target = words[:5]
        os.set_inheritable(int(lock), False)
        self._lock = int(lock)
        with open(f"{self._socket_path}.key", "rb") as file:
            self._key = file.read()
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, connection
        for pid, descriptor in (map(int, word.split(":")) for word in words[5:]):
            os.set_inheritable(descriptor, False)
            self._adopt(pid, socket.socket(fileno=descriptor))
        self._standby: tuple[int, int, socket.socket] | None = None  # pid, pidfd, channel
        self._standby_due = 0.0
        self._last_used = time.monotonic()
        self._census = Census(self._socket_path, self._mode, self._target)
        _quiet_streams()
        self._groups: list[preload.Group] = []
        self._files: dict[str, tuple[int, int, int]] = {}
        self._shell: type | None = None  # of kernels, when the engine is imported
        preload.forget(native)
        store.connects_ahead = False
        preload.watch_generators()
        self._seen: list[int] = []
        self._nowhere: set[str] = set()  # names of no module of their own

    # --- imports

    def _read_profile(self) -> tuple[list[int], profile.Profile]:
        """The stamp first: what is written after it will be read again."""
        return profile.stamp_of(self._profile_path), profile.load(self._profile_path)

    def _load(self, seen: list[int], learned: profile.Profile) -> None:
        """Imports what the profile says; if one of them is refused, notes it and begins anew without it. RetireError if
        the process can't be forked then."""
        self._note_files([])
        self._seen = seen
        refused: dict[str, str] = {}
        known = ChainMap(refused, learned.refused)
        for earlier in self._groups:  # of an earlier profile
            if changed := self._changed_by_program(learned, earlier):
                refused[earlier.name] = f"{_CHANGED}{', '.join(sorted(changed))} before it"
            if earlier.name in learned.refused:
                self._begin_anew()
        if self._mode == "kernel" and not self._groups:
            self._load_engine(ENGINES[self._target], learned, refused)
        for name in learned.modules:
            why = profile.refusal(known, name)
            if why is None and (group := self._import(name, refused)) is not None:
                changed = self._changed_by_program(learned, group)
                if not changed:
                    self._groups.append(group)
                    continue
                why = refused[name] = f"{_CHANGED}{', '.join(sorted(changed))} before it"
            if why is not None and why.startswith(_CHANGED):
                break  # whatever comes later may have looked at it through this one
        if refused:
            latest = profile.load(self._profile_path)
            latest.refused.update(refused)
            profile.save(self._profile_path, latest)
            self._begin_anew()
        self._settle_imports()
        if (why := preload.unfit()) is not None:
            raise RetireError(why)

    def _load_engine(self, engine: Engine, learned: profile.Profile, refused: dict[str, str]) -> None:
        for name in engine.imports:
            if name not in learned.refused and (group := self._import(name, refused)) is not None:
                self._groups.append(group)
        os.environ.update(engine.environment)
        if self._groups:
            self._groups[-1].environment.update(engine.environment)
            self._shell = engine.shell_type()

    def _import(self, name: str, refused: dict[str, str]) -> preload.Group | None:
        try:
            # One that raises may be asked for by somebody who expects that.
            others = [each for each, why in refused.items() if not why.startswith(preload.RAISED)]
            group = preload.load(name, self._shell, others)
            if group is not None:
                self._note_files(list(group.modules.values()))
            elif name not in sys.modules:
                self._nowhere.add(name)
            return group
        except preload.RefusedError as why:
            refused[name] = str(why)
            return None

    def _note_files(self, modules: list[ModuleType]) -> None:
        """As they are now, when they are first noted: a later look would take an edit for what was imported."""
        for path in _paths(modules) - self._files.keys():
            self._files[path] = _stamp(path)

    def _changed_by_program(self, learned: profile.Profile, group: preload.Group) -> set[str]:
        """Variables that the import reads, and that the program had set otherwise by then."""
        then = learned.changed_before(group.name)
        return {
            name
            for name, value in then.items()
            if group.concerns(name) and value != profile.hash_of(os.environ.get(name))
        }

    def _settle_imports(self) -> None:
        for group in self._groups:
            group.settle()
        preload.spare_the_exit()
        gc.collect()
        gc.freeze()  # a collection in a fork then touches none of these pages
        present = list(sys.modules.values())
        self._pids = become.own_pids(present)
        self._mains = become.own_mains(present)
        self._packages = stash.packages_of(self._groups)
        self._draws = any(group.draws for group in self._groups)
        self.quick_end = preload.ends_in_silence()
        self._census.loaded(sum(len(group.modules) for group in self._groups), self._seen)

    def _begin_anew(self) -> NoReturn:
        """This process again, from its first line; programs that were forked stay its children."""
        self._drop_standby()
        passed = []
        for pid, connection in self._children.values():
            connection.set_inheritable(True)
            passed.append(f"{pid}:{connection.fileno()}")
        os.set_inheritable(self._lock, True)
        boot = os.path.join(os.path.dirname(__file__), "boot.py")
        os.execv(sys.executable, [sys.executable, boot, "zygote", *self._words[:5], *passed])

    # --- the loop

    def serve(self) -> NoReturn:
        """Until it retires."""
        try:
            self._load(*self._read_profile())
            self._open()
            self._census.make_room()
            while True:
                self._turn(self._listener)
        except RetireError as why:
            self._retire(str(why))

    def _open(self) -> None:
        self._listener = _listen(self._socket_path)
        self._identity = profile.stamp_of(self._socket_path)[:2]

    def _remove_socket(self) -> None:
        """Unless it is another's by now."""
        with contextlib.suppress(OSError):
            if profile.stamp_of(self._socket_path)[:2] == getattr(self, "_identity", None):
                os.unlink(self._socket_path)

    def _turn(self, listener: socket.socket) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        for process in self._children:
            poll.register(process, select.POLLIN)
        if self._standby is not None:
            poll.register(self._standby[1], select.POLLIN)
        now = time.monotonic()
        wait = _TICK if self._standby is not None else min(_TICK, max(0.0, self._standby_due - now))
        ready = {descriptor for descriptor, _ in poll.poll(wait * 1000)}
        for process in ready & self._children.keys():
            self._bury(process)
        if self._standby is not None and self._standby[1] in ready:
            self._drop_standby()
            self._standby_due = time.monotonic() + 10  # something kills it: don't spin
        if listener.fileno() in ready:
            if self._standby is None:
                self._make_standby()
            connection, _ = listener.accept()
            self._answer(connection)
        elif not ready:
            self._idle()

    def _idle(self) -> None:
        now = time.monotonic()
        if profile.stamp_of(self._socket_path)[:2] != self._identity:
            raise RetireError("its socket is gone")
        if now - self._last_used > IDLE_EXIT:
            raise RetireError("it was not used for long")
        if profile.stamp_of(self._profile_path) != self._seen:
            self._learn()
        if self._standby is None and now >= self._standby_due:
            self._make_standby()
        standby = None if self._standby is None else self._standby[0]
        if (why := self._census.look(len(self._children), standby)) is not None:
            raise RetireError(why)

    def _learn(self) -> None:
        """A program has ended, or a cell: imports what is new. Mostly nothing is."""
        seen, learned = self._read_profile()
        new = list(self._new(learned))
        if not new and not any(self._is_spoilt(group, learned) for group in self._groups):
            self._seen = seen
            self._census.learned(seen)
            return
        self._drop_standby()
        if len(new) > MANY:
            self._listener.close()
            self._remove_socket()
        self._load(seen, learned)
        if self._listener.fileno() < 0:
            self._open()

    def _new(self, learned: profile.Profile) -> Iterator[str]:
        for name in learned.modules:
            why = profile.refusal(learned.refused, name)
            if why is not None and why.startswith(_CHANGED):
                return
            if why is None and name not in sys.modules and name not in self._nowhere:
                yield name

    def _is_spoilt(self, group: preload.Group, learned: profile.Profile) -> bool:
        return group.name in learned.refused or bool(self._changed_by_program(learned, group))

    # --- one request

    def _answer(self, connection: socket.socket) -> None:
        """Hands the request to a fork, or says why not."""
        received = self._receive(connection)
        if received is None:
            return
        request, descriptors = received
        if request.mode == "kernel" and has_options(request.arguments):
            self._drop_standby()  # its shell was made without them
            self._make_standby(connection)
        try:
            self._hand_over(connection, descriptors)
        except OSError as error:
            _refuse(connection, f"{type(error).__name__}: {error}")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self, connection: socket.socket) -> tuple[wire.Request, list[int]] | None:
        """A request that may be served, and its descriptors. None: a peer that sends something else is only told so."""
        connection.settimeout(2.0)
        descriptors: list[int] = []
        try:
            _check_peer(connection)
            connection.sendall(b"ready")
            word, descriptors, _flags, _ = socket.recv_fds(connection, 16, 253, socket.MSG_CMSG_CLOEXEC)
            if (why := ASKED_TO_GO.get(word)) is not None:
                raise RetireError(why)
            if word != b"start" or len(descriptors) < 3:
                raise wire.MalformedError("no request")
            request = wire.read(descriptors[0])
            self._check(request)
            return request, descriptors
        except (wire.MalformedError, OSError) as error:
            _refuse(connection, f"{type(error).__name__}: {error}")
        except RetireError as why:
            _refuse(connection, str(why))
            raise
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _check(self, request: wire.Request) -> None:
        """Raises MalformedError for a request that is not this zygote's, RetireError if it may serve none any more."""
        if request.key != self._key:
            raise wire.MalformedError("it is for another environment")
        for path, stamp in self._files.items():
            if _stamp(path) != stamp:
                raise RetireError(f"{path} has changed")
        if (why := preload.unfit()) is not None:
            raise RetireError(why)
        if request.mode == "script" and (why := self._edited(request)) is not None:
            raise wire.MalformedError(why)

    def _edited(self, request: wire.Request) -> str | None:
        """A reason if the program may now change its environment before an import that was made ahead, or if a file
        of its own would be imported in place of a library."""
        learned = profile.load(self._profile_path)
        for path, stamp in learned.files.items():
            if profile.stamp_of(path) == stamp:
                continue
            if profile.may_change_environment(path):
                return f"{path} was edited, and may change the environment before an import"
            if self._draws and profile.may_seed(path):
                return f"{path} was edited, and may seed random numbers before an import that draws some"
        script = os.path.realpath(request.target)
        own = stash.names_in(os.path.dirname(script))
        if shadowed := own & self._packages:
            return f"{min(shadowed)} lies beside the script and would be imported in place of a library"
        return None

    def _hand_over(self, connection: socket.socket, descriptors: list[int]) -> None:
        assert self._standby is not None
        pid, process, channel = self._standby
        self._standby = None
        with channel:
            socket.send_fds(channel, [b"start"], [connection.fileno(), *descriptors])
        os.close(process)
        self._adopt(pid, connection)
        self._last_used = time.monotonic()
        self._standby_due = self._last_used + _SETTLE
        self._census.forked()

    def _adopt(self, pid: int, connection: socket.socket) -> None:
        self._children[os.pidfd_open(pid)] = (pid, connection)

    def _bury(self, process: int) -> None:
        pid, connection = self._children.pop(process)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"end %d" % status)

    # --- standby

    def _make_standby(self, asking: socket.socket | None = None) -> None:
        """Forks one; `asking`: at once, for that launcher, whose kernel makes its shell itself. REQUIRES: no `with` and
        no `finally` up to the main module: a fork leaves through all of it."""
        if (why := preload.unfit()) is not None:
            raise RetireError(why)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            # Objects that would close a number which is then another file's.
            for owned in (mine, asking, self._listener, *(each for _, each in self._children.values())):
                if owned is not None:
                    owned.detach()
            _Standby(self, its, prepares=asking is None).live()
        its.close()
        self._standby = (pid, os.pidfd_open(pid), mine)

    def _drop_standby(self) -> None:
        if self._standby is None:
            return
        pid, process, channel = self._standby
        self._standby = None
        channel.close()  # it ends by itself
        os.close(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _retire(self, why: str) -> NoReturn:
        """Programs that still run are told of their end by nobody; their launchers know what to do."""
        self._drop_standby()
        self._census.retired(why)
        self._remove_socket()
        os._exit(0)


class _Standby:
    """The fork, from its first moment until it is a program."""

    def __init__(self, zygote: Zygote, channel: socket.socket, prepares: bool) -> None:
        self._zygote = zygote
        self._channel = channel
        self._prepares = prepares

    def live(self) -> NoReturn:
        """Prepares, waits for a request, becomes what it says. Whatever fails here ends this process alone: the
        launcher then starts plainly."""
        try:
            request = self._wait()
        except BaseException as error:
            self._zygote._census.note(f"standby failed: {type(error).__name__}: {error}")
            os._exit(70)
        become.leave(request.mode, request.target, request.arguments)

    def _wait(self) -> wire.Request:
        zygote = self._zygote
        os.setsid()
        channel = self._channel.detach()
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, channel):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        hidden = stash.Stash(zygote._groups)
        hidden.hide()
        preload.leave_generators()
        become.new_main()
        if zygote._mode == "kernel" and self._prepares:
            ENGINES[zygote._target].prepare()
        waiting = socket.socket(fileno=channel)
        _word, descriptors, _, _ = socket.recv_fds(waiting, 16, 253, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            os._exit(0)  # the zygote is gone
        waiting.close()
        return self._become(hidden, descriptors)

    def _become(self, hidden: stash.Stash, descriptors: list[int]) -> wire.Request:
        zygote = self._zygote
        connection, memory, folder, life, *passed = descriptors
        request = wire.read(memory)
        connection, folder, life = become.place_descriptors(passed, request.descriptors, (connection, folder, life))
        become.settle(request, hidden, folder, zygote._pids, zygote._mains)
        os.close(folder)
        if request.mode == "kernel" and (why := ENGINES[request.target].outdated()) is not None:
            _refuse(socket.socket(fileno=connection), f"its shell was made before {why}")
            os._exit(0)
        become.describe(request.mode, request.target, request.arguments)
        zygote.at_end.append(hidden.outlive)
        become.learn(zygote._profile_path, request.mode, request.target, hidden)
        become.die_with(life, request.mode == "kernel")
        become.announce(connection, zygote.quick_end)
        return request


def _listen(path: str) -> socket.socket:
    """The lock is held, so whatever lies at `path` is nobody's any more. RetireError where none can be made."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError as error:
        raise RetireError(f"it can't listen at {path}: {error}") from error
    return listener


def _check_peer(connection: socket.socket) -> None:
    _pid, uid, _gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        raise wire.MalformedError(f"user {uid} may not ask")


def _refuse(connection: socket.socket, why: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.sendall(f"no {why}"[:1000].encode("utf-8", "replace"))


def _quiet_streams() -> None:
    """What an import writes is seen by the size of these files, and by nobody else."""
    for number in (1, 2):
        quiet = os.memfd_create("overmind-zygote-output", os.MFD_CLOEXEC)
        os.dup2(quiet, number)
        os.close(quiet)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _paths(modules: list[ModuleType]) -> set[str]:
    """Every file that was imported, every folder that packages are installed in, and what runs at an interpreter's
    start."""
    paths = {str(origin) for module in modules if (origin := _file_of(module)) is not None}
    for folder in {os.path.abspath(each) for each in sys.path if os.path.isdir(each)}:
        paths.add(folder)
        with contextlib.suppress(OSError):
            paths.update(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))
    paths.update(str(_file_of(module)) for name, module in list(sys.modules.items()) if name.startswith("overmind"))
    paths.add(sys.executable)
    return paths


def _file_of(module: ModuleType) -> str | None:
    try:
        spec = vars(module).get("__spec__")
    except TypeError:
        return None
    origin = getattr(spec, "origin", None)
    return origin if isinstance(origin, str) and os.path.isabs(origin) else None
