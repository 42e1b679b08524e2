# SPDX-License-Identifier: MIT
"""Fixtures for every level: a private daemon per test, fresh processes, the models.

A test that takes `runtime` owns a runtime folder; the daemon that any process starts in it is stopped by its pid
when the test ends, and nothing of it may be left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fresh import Fresh, Run

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")[:8] or str(os.getpid())
"""The name of this run, the same in all its workers: what a run leaves behind carries it."""


def pytest_configure() -> None:
    """A test that forgets the fixture `runtime` never meets the user's store; test_zz_leaks.py finds what it started.
    Only here: programs of tests import this file, too."""
    os.environ["OVERMIND_RUNTIME_DIR"] = f"/tmp/ov-{RUN}-none"


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits for a condition with a deadline; the only kind of waiting in these tests."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def settle(path: Path) -> None:
    """Waits until nothing at or below `path` was changed within the last two ticks: what was is not kept."""
    from overmind import modules  # of the fixtures themselves nothing needs it to be built

    newest = max(each.stat().st_ctime_ns for each in (path, *path.rglob("*")))
    wait_for(lambda: time.time_ns() - newest > 2 * modules.TICK_NS, 5, f"{path} is settled")


def processes_of(runtime: Path) -> list[psutil.Process]:
    """Every process of the daemon of this runtime folder, and of its zygotes: the command line names the folder.
    A launcher's environment does."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or [""]
        ours = any("overmindd" in word for word in words[:1]) or any(
            word.endswith("zygote/boot.py") for word in words[:2]
        )
        if (ours and any(str(runtime) in word for word in words)) or (
            words[0].endswith("/overmind-launch") and _environment(process).get("OVERMIND_RUNTIME_DIR") == str(runtime)
        ):
            found.append(process)
    return found


def _environment(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}


def stop_daemon(runtime: Path) -> None:
    """Ends the daemon of this folder and its zygotes, politely, then by their pids. Its segments go with it."""
    for process in processes_of(runtime):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _gone, alive = psutil.wait_procs(processes_of(runtime), timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)
    # A start that ended just now may have left a zygote behind that was only beginning.
    for process in processes_of(runtime):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def own_runtime() -> Iterator[Path]:
    """A runtime folder in the environment of every process that is started meanwhile; nothing of it may be left."""
    folder = Path(tempfile.mkdtemp(prefix=f"ov-{RUN}-", dir="/tmp"))  # short: a socket path has 107 characters at most
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERMIND_RUNTIME_DIR", str(folder))
        for name in ("OVERMIND_BUDGET", "OVERMIND_LOG", "OVERMIND_DISABLE", "OVERMIND_ZYGOTE"):
            patch.delenv(name, raising=False)
        try:
            yield folder
        finally:
            stop_daemon(folder)
    assert not processes_of(folder), "a process of the daemon is left"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime folder of this test's own."""
    with own_runtime() as folder:
        yield folder


@pytest.fixture
def site_packages(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for packages of an environment of this test's own, which sees all that is installed in ours. Programs
    and kernels that the test starts run in it. A change of a folder that packages are installed in ends every zygote
    that uses it, other tests' among them."""
    import sysconfig
    import venv

    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    folder = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if installed.name != "__pycache__":
            (folder / installed.name).symlink_to(installed)
    monkeypatch.setattr(sys, "executable", str(place / "bin" / "python"))
    return folder


@pytest.fixture(autouse=True)
def beside_others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests of several workers run beside each other; those that look for what others left wait until none runs."""
    base = tmp_path_factory.getbasetemp()
    alone = request.node.get_closest_marker("alone") is not None
    with open((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "running", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    server = Fresh()
    yield server
    server.close()


class Oracle:
    """The words of the case list: nat, hit, by. One daemon for the runs of one test."""

    def __init__(self, fresh: Fresh) -> None:
        self._fresh = fresh

    def nat(self, source: str, **options: object) -> Run:
        """Runs `source` natively, in a fresh process."""
        env = {**options.pop("env", {}), "OVERMIND_DISABLE": "1"}  # type: ignore[dict-item]
        return self._fresh.run(source, on=False, env=env, **options)  # type: ignore[arg-type]

    def run(self, source: str, **options: object) -> Run:
        """Runs `source` with Overmind on, once."""
        return self._fresh.run(source, on=True, **options)  # type: ignore[arg-type]

    def hit(self, source: str, **options: object) -> Run:
        """Two fresh processes with Overmind on; every load of the second must be a hit, and both equal to native."""
        return self._compared(source, {"hit"}, options)

    def by(self, source: str, **options: object) -> Run:
        """As hit, but a bypass with a reason will do."""
        return self._compared(source, {"hit", "bypass"}, options)

    def _compared(self, source: str, allowed: set[str], options: dict[str, object]) -> Run:
        native = self.nat(source, **options)
        first = self.run(source, **options)
        second = self.run(source, **options)
        assert second.records, "no load was seen"
        for outcome, reason, loader, *_ in second.records:
            assert outcome in allowed, f"{loader}: {outcome}: {reason}"
            assert outcome == "hit" or reason, f"{loader}: a bypass without a reason"
        assert first.value == native.value, "the first load differs from the native one"
        assert second.value == native.value, "the second load differs from the native one"
        return second


@pytest.fixture
def oracle(runtime: Path, fresh: Fresh) -> Oracle:
    return Oracle(fresh)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for one test's files, also its working folder's parent."""
    return tmp_path


@pytest.fixture(autouse=True)
def quiet_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks for a hub unless it says so."""
    if "HF_HUB_OFFLINE" not in os.environ:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
