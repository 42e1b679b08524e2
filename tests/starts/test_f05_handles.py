# SPDX-License-Identifier: MIT
"""F05: what a kernel from a zygote holds is its own: ids, history, functions for the exit, log files, code of now."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import wait_for
from kernel_sessions import Session, session
from overmind.kernel import kernelspec
from starts import ENGINES, WARM_SECONDS, forked_session, plain_starts, refused, warm_kernel, zygotes

LIBRARY = "overmind_test_library"

STATE = """
import atexit, gc, json, logging, os, signal, sys, threading, warnings
shell = get_ipython()
print(json.dumps({
    "modules": sorted(name for name in sys.modules if not name.startswith("overmind.zygote.")),
    "main": sys.modules["__main__"] is shell.user_module,
    "places": [shell.starting_dir, os.getcwd(), shell.user_ns["_dh"], sys.path],
    "finders": [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path],
    "hooks": [type(each).__name__ for each in (sys.excepthook, sys.displayhook)] + [len(sys.path_hooks)],
    "gc": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_debug(), len(gc.garbage)],
    "filters": [str(each) for each in warnings.filters],
    "handlers": [repr(each) for each in logging.getLogger().handlers],
    "loggers": sorted(name for name, each in logging.root.manager.loggerDict.items() if getattr(each, "handlers", 0)),
    "atexit": atexit._ncallbacks(),
    "signals": [str(signal.getsignal(n)).partition(" at ")[0] for n in sorted(signal.valid_signals())],
    "mask": [signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), os.umask(0o22)],
    "names": sorted(shell.user_ns),
    "streams": [repr(sys.__stdout__), repr(sys.__stderr__), repr(sys.stdin), type(sys.stdout).__name__],
    "variables": sorted(os.environ.items()),
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), threading.stack_size()],
    "history": [shell.history_manager.enabled, shell.history_manager.save_thread.is_alive()],
}, default=str))
"""


@pytest.fixture
def library(site_packages: Path) -> Path:
    """The file of a module in the environment of this test."""
    return site_packages / f"{LIBRARY}.py"


@pytest.fixture(autouse=True)
def profile_of_ipython(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)


def _soon_warm(runtime: Path, before: list[dict[str, object]]) -> None:
    known = {row["pid"] for row in before}
    wait_for(lambda: bool({row["pid"] for row in zygotes(runtime)} - known), WARM_SECONDS, "a new zygote waits")


@pytest.mark.parametrize("engine", ENGINES)
def test_state(runtime: Path, folder: Path, engine: str) -> None:
    """The interpreter looks as it does in a plain start: before the first import, and after it."""
    found: list[list[dict[str, Any]]] = [[], []]
    with session(kernelspec.argv(engine), zygote=True) as plain:
        for each in ("pass", "import decimal, xml.dom.minidom"):
            plain.text(each)
            found[0].append(json.loads(plain.text(STATE)))
        _soon_warm(runtime, [])
        with forked_session(runtime, engine) as forked:
            for each in ("pass", "import decimal, xml.dom.minidom"):
                forked.text(each)
                found[1].append(json.loads(forked.text(STATE)))
    for state in found[1]:
        state["finders"] = [each for each in state["finders"] if each != "Stash"]
    assert found[1] == found[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_ids(runtime: Path, folder: Path, library: Path, engine: str) -> None:
    library.write_text(
        "import os\nPID = os.getpid()\nclass Held:\n    pid = os.getpid()\n"
        "    def __init__(self):\n        self.own_pid = os.getpid()\nheld = Held()\n"
    )
    code = f"""
import logging, multiprocessing, os, threading, {LIBRARY}
me = os.getpid()
print([each == me for each in (
    {LIBRARY}.PID, {LIBRARY}.Held.pid, {LIBRARY}.held.own_pid, multiprocessing.current_process().pid,
    threading.main_thread().native_id,
    logging.makeLogRecord({{}}).process or me,
)])
print(getattr(getattr(get_ipython().kernel, "session", None), "pid", me) == me)
"""
    warm_kernel(runtime, folder, code, engine)
    with forked_session(runtime, engine) as running:
        assert running.text(code) == "[True, True, True, True, True, True]\nTrue\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_history_of_siblings(runtime: Path, folder: Path, engine: str) -> None:
    warm_kernel(runtime, folder, "1", engine)
    facts = (
        "h = get_ipython().history_manager\nprint(h.session_number, h.enabled, h.save_thread.is_alive(), h.hist_file)"
    )
    with forked_session(runtime, engine) as one, forked_session(runtime, engine) as other:
        assert len(zygotes(runtime)) == 1
        told = [running.text(facts).split() for running in (one, other)]
        assert told[0][0] != told[1][0] and [each[1:3] for each in told] == [["True", "True"]] * 2
        assert told[0][3] == told[1][3] and Path(told[0][3]).is_relative_to(folder)
        for name, running in (("one", one), ("other", other)):
            for i in range(3):
                running.text(f"'{name} {i}'")
    with forked_session(runtime, engine) as third:
        seen = third.text("%history -g -n")
    for number, name in zip((told[0][0], told[1][0]), ("one", "other"), strict=True):
        for i in range(3):
            assert f"{number}/{i + 2}: '{name} {i}'" in seen


def _until_ended(running: Session) -> None:
    kernel = psutil.Process(int(running.text("import os; print(os.getpid())")))
    running.close()
    wait_for(lambda: not kernel.is_running() or kernel.status() == psutil.STATUS_ZOMBIE, 20, "the kernel has ended")


@pytest.mark.parametrize("engine", ENGINES)
def test_functions_for_the_exit(runtime: Path, folder: Path, library: Path, engine: str) -> None:
    """A library's runs where the kernel imported the library, once; the user's runs; both in the native order."""
    ends = folder / "ends"
    library.write_text(
        f"import atexit, os, weakref\ndef end(): open({str(ends)!r}, 'a').write('library\\n')\natexit.register(end)\n"
        f"class Held: pass\nheld = Held()\n"
        f"weakref.finalize(held, lambda: open({str(ends)!r}, 'a').write('finalizer\\n'))\n"
    )
    user = f"import atexit\natexit.register(lambda: open({str(ends)!r}, 'a').write('user\\n'))"
    before = zygotes(runtime)
    with session(kernelspec.argv(engine), zygote=True) as first:
        first.text(f"{user}\nimport {LIBRARY}")
        _soon_warm(runtime, before)
        _until_ended(first)
    native = ends.read_text()
    assert sorted(native.split()) == ["finalizer", "library", "user"]
    ends.unlink()
    with forked_session(runtime, engine) as without:
        without.text(user)
        _until_ended(without)
    assert [each for each in ends.read_text().split() if each != "finalizer"] == ["user"]
    ends.unlink()
    with forked_session(runtime, engine) as again:
        again.text(f"{user}\nimport {LIBRARY}")
        assert not ends.exists()
        _until_ended(again)
    assert ends.read_text() == native
    ends.unlink()
    for row in zygotes(runtime):
        process = psutil.Process(int(row["pid"]))
        process.terminate()
        process.wait(20)
    assert not ends.exists()


LAST = """
import builtins, ctypes, os, sys, threading, types
class Last:
    def __init__(self, name):
        self.name = name
    def __del__(self, write=os.write, file=os.open({ends!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
        write(file, (self.name + "\\n").encode())
kept, builtins.kept, sys.kept = Last("namespace"), Last("builtins"), Last("sys")
cycle = Last("cycle")
cycle.itself = cycle
sys.modules["own"] = types.ModuleType("own")
sys.modules["own"].kept = Last("module")
local = threading.local()
local.kept = Last("thread")
if {with_library}:
    ctypes.CDLL({library!r})
"""
HANDLER = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((destructor)) static void end(void) {
  int file = open(ENDS, O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (write(file, "library\\n", 8) < 0) return;
}
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("with_library", [False, True])
def test_objects_and_libraries_that_live_until_the_end(
    runtime: Path, folder: Path, engine: str, with_library: bool
) -> None:
    """What a kernel's cells left gets its last call, though the end of a forked one is cut short."""
    ends = folder / "ends"
    (folder / "handler.c").write_text(HANDLER)
    built = str(folder / "handler.so")
    subprocess.run(["cc", "-shared", "-fPIC", f'-DENDS="{ends}"', "-o", built, str(folder / "handler.c")], check=True)
    cell = LAST.format(ends=str(ends), library=built, with_library=with_library)
    with session(kernelspec.argv(engine), zygote=False) as plain:
        plain.text(cell)
        _until_ended(plain)
    native = sorted(ends.read_text().split())
    assert "namespace" in native and ("library" in native) == with_library
    ends.unlink()
    warm_kernel(runtime, folder, "1", engine)
    with forked_session(runtime, engine) as forked:
        forked.text(cell)
        _until_ended(forked)
    assert sorted(ends.read_text().split()) == native


@pytest.mark.parametrize("engine", ENGINES)
def test_log_files(runtime: Path, folder: Path, library: Path, engine: str) -> None:
    """A library that opens its log when it is imported is imported by each kernel itself."""
    log = folder / "library.log"
    library.write_text(
        f"import logging\nlogger = logging.getLogger({LIBRARY!r})\nhandler = logging.FileHandler({str(log)!r})\n"
        "logger.addHandler(handler)\n"
    )
    code = f"import os, {LIBRARY}\n{LIBRARY}.logger.warning('kernel %d', os.getpid())\nprint(os.getpid())"
    warm_kernel(runtime, folder, code, engine)
    wait_for(lambda: LIBRARY in refused(runtime), WARM_SECONDS, "it is known that the import opens a file")
    assert "descriptors" in refused(runtime)[LIBRARY]
    wait_for(lambda: bool(zygotes(runtime)), WARM_SECONDS, "a zygote waits")
    with forked_session(runtime, engine) as one, forked_session(runtime, engine) as other:
        pids = [running.text(code).strip() for running in (one, other)]
        where = f"import os\nprint(os.readlink(f'/proc/self/fd/{{{LIBRARY}.handler.stream.fileno()}}'))"
        assert [running.text(where).strip() for running in (one, other)] == [str(log)] * 2
    assert log.read_text().splitlines()[-2:] == [f"kernel {pid}" for pid in pids]


def _edit(library: Path) -> None:
    library.write_text("VALUE = 'edited'\n")


def _upgrade(library: Path) -> None:
    """As pip does: other files, and another folder of facts."""
    (library.parent / f"{LIBRARY}-1.0.dist-info").rename(library.parent / f"{LIBRARY}-2.0.dist-info")
    (library.parent / f"{LIBRARY}_data.py").write_text("VALUE = 'edited'\n")


def _remove(library: Path) -> None:
    library.unlink()


@pytest.mark.parametrize("change", [_edit, _upgrade, _remove])
def test_code_that_changes(runtime: Path, folder: Path, library: Path, change: Callable[[Path], None]) -> None:
    """The next kernel sees it, though the zygote and its standby are older."""
    library.write_text(f"from {LIBRARY}_data import VALUE\n")
    (library.parent / f"{LIBRARY}_data.py").write_text("VALUE = 'first one'\n")
    (library.parent / f"{LIBRARY}-1.0.dist-info").mkdir()
    code = f"try:\n    from {LIBRARY} import VALUE\nexcept ImportError:\n    VALUE = 'gone'\nprint(VALUE)"
    warm_kernel(runtime, folder, code, ENGINES[-1])
    with forked_session(runtime, ENGINES[-1]) as running:
        assert running.text(code) == "first one\n"
        before = zygotes(runtime)
        change(library)
        expected = {"_edit": "edited\n", "_upgrade": "edited\n", "_remove": "gone\n"}[change.__name__]
        starts = len(plain_starts(runtime))
        with session(kernelspec.argv(ENGINES[-1]), zygote=True) as plain:
            assert plain.text(code) == expected
        assert len(plain_starts(runtime)) == starts + 1 and "has changed" in plain_starts(runtime)[-1]
        assert running.text(code) == "first one\n", "the kernel that runs goes on as it was"
    _soon_warm(runtime, before)
    with forked_session(runtime, ENGINES[-1]) as running:
        assert running.text(code) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_configuration_that_changes(runtime: Path, folder: Path, engine: str) -> None:
    """A shell that was made ahead does not keep what the user has configured since; and what a configuration file does,
    it does in the kernel."""
    warm_kernel(runtime, folder, "1", engine)
    with forked_session(runtime, engine):
        pass
    file = folder / "ipython" / "profile_default" / "ipython_config.py"
    file.write_text(
        "import os\nc.InteractiveShellApp.exec_lines = ['configured = %r' % ((os.getpid(), os.getcwd()),)]\n"
        "c.InteractiveShell.cache_size = 77\n"
    )
    code = "import os\nprint(get_ipython().cache_size, configured == (os.getpid(), os.getcwd()))"
    with session(kernelspec.argv(engine), zygote=True) as changed:
        assert changed.text(code) == "77 True\n"
    wait_for(lambda: bool(zygotes(runtime)), WARM_SECONDS, "a zygote waits")
    for _ in range(2):  # the first may still find the standby from before
        with session(kernelspec.argv(engine), zygote=True) as running:
            assert running.text(code) == "77 True\n"
    with forked_session(runtime, engine) as running:
        assert running.text(code) == "77 True\n"
    file.unlink()
    with session(kernelspec.argv(engine), zygote=True) as running:
        assert running.text("print(get_ipython().cache_size, 'configured' in globals())") == "1000 False\n"
