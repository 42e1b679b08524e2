# SPDX-License-Identifier: MIT
"""Processes that a test holds on to: several at once, killed half-way, or run as another user.

`fresh.Fresh` runs one source and waits for its end; a `Process` runs beside the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import processes_of, wait_for
from fresh import Run, _parse, _program, _python_path

STRANGER = 64001  # user ids that no account of a normal machine has
OTHER_STRANGER = 64002


class Process:
    """A new interpreter that runs `source` with Overmind on (or not). Its output goes to files: a pipe that nobody
    reads would stop it. Use it in a `with`: it is killed by its pid when the block ends."""

    def __init__(
        self,
        source: str,
        *,
        on: bool = True,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        uid: int | None = None,
        prepare: Callable[[], object] | None = None,
        isolated: bool = False,
    ) -> None:
        self._files = tempfile.TemporaryDirectory()
        command = [*(as_user(uid) if uid is not None else []), sys.executable, "-c", _program(source, on)]
        home = {"HOME": "/nonexistent"} if uid is not None else {}
        full = {**os.environ, "PYTHONPATH": _python_path(), **home, **(env or {})}
        with open(self._path("out"), "wb") as out, open(self._path("err"), "wb") as err:
            self.popen = subprocess.Popen(
                command,
                env=full,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=prepare,
                start_new_session=isolated,
            )

    def _path(self, name: str) -> str:
        return os.path.join(self._files.name, name)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._files.cleanup()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.popen.pid, number)
            self.popen.wait(30)

    def alive(self) -> bool:
        return self.popen.poll() is None

    def result(self, seconds: float = 60, check: bool = True) -> Run:
        """Waits for its end. AssertionError with its output if it failed or hangs."""
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.output()}") from None
        run = _parse(Path(self._path("out")).read_text(), Path(self._path("err")).read_text(), code)
        assert not check or code == 0, f"ended with {code}: {self.output()}"
        return run

    def output(self) -> str:
        return Path(self._path("out")).read_text() + Path(self._path("err")).read_text()


def write_module(path: Path, text: str) -> None:
    """Writes a module of the user's own, and returns when a process that starts now is clearly younger than it: a
    load whose code is younger than its process is never kept, and clocks of files move in ticks."""
    path.write_text(text)
    while time.time_ns() < path.stat().st_ctime_ns + 50_000_000:
        time.sleep(0.005)


def as_user(uid: int) -> list[str]:
    """A command prefix that runs what follows as a normal user.

    That user may read every file, and nothing else beyond its own: the interpreter of the tests may lie in a folder of
    root's. It may not write, signal or trace what isn't its own.
    """
    if os.getuid() == uid:
        return []
    if os.getuid() != 0:
        pytest.skip("only root can run a process as another user")
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv (package util-linux)")
    return [
        setpriv,
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=-all,+dac_read_search",
    ]


def normal_user() -> int:
    """A user that isn't root: this process's own if it is one."""
    return os.getuid() or STRANGER


def hand_over(path: Path, uid: int) -> None:
    """Makes `path` the user's own."""
    if os.getuid() != uid:
        os.chown(path, uid, uid)


def kill_daemon(runtime: Path) -> None:
    """Keeper and server with SIGKILL, until none is left: each starts the other anew if it sees it die."""

    def none_left() -> bool:
        found = processes_of(runtime)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not found

    wait_for(none_left, 20, "no process of the daemon is left")


# --- a kernel without a system call -------------------------------------------------------------

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBERS = {"x86_64": {"memfd_create": 319, "ioctl": 16}, "aarch64": {"memfd_create": 279, "ioctl": 29}}


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def forbid(call: str, error: int) -> None:
    """From now on `call` fails with `error` in this process and all that it starts: a seccomp filter."""
    number = _NUMBERS[os.uname().machine][call]
    code = (_Instruction * 4)(
        _Instruction(_LOAD_NUMBER, 0, 0, 0),
        _Instruction(_JUMP_IF_EQUAL, 0, 1, number),
        _Instruction(_RETURN, 0, 0, _ERRNO | error),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _FilterProgram(4, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
