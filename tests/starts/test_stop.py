# SPDX-License-Identifier: MIT
"""`overmind stop`: nothing of Overmind is left in its folder but what the user runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import processes_of, wait_for
from starts import Kernel, forked, outcome, overmind_run, plain_starts, standby_waits, warm, warm_kernel, zygotes

WAITS = "import decimal, os, sys\nprint('runs', os.getpid(), flush=True)\nsys.stdin.readline()\nsys.exit(6)\n"


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def stop() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "overmind.cli", "stop", "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def running(program: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, which waits for a line, and its process id."""
    with subprocess.Popen(
        overmind_run(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            word, pid = process.stdout.readline().split()
            assert word == "runs"
            yield process, int(pid)
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.wait(20)


def family(pid: int) -> list[psutil.Process]:
    """A zygote and what it has forked."""
    zygote = psutil.Process(pid)
    return [zygote, *zygote.children()]


def gone(processes: list[psutil.Process]) -> bool:
    return not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_the_zygote_and_its_standby_end_and_a_program_goes_on(runtime: Path, tmp_path: Path) -> None:
    program = script(tmp_path, WAITS)
    warm(runtime, program)
    subprocess.run([sys.executable, "-m", "overmind.cli", "start"], check=True, capture_output=True, timeout=60)
    before = plain_starts(runtime)
    with running(program) as (process, pid):
        assert plain_starts(runtime) == before, "it is a fork"
        wait_for(lambda: len(family(zygotes(runtime)[0]["pid"])) == 3, 20, "the program and the next standby")
        (zygote,) = zygotes(runtime)
        everybody = family(zygote["pid"])
        found = stop()
        assert found["stopped"] is True and isinstance(found["daemon_pid"], int)
        assert found["zygotes"] == [{"pid": zygote["pid"], "mode": "script", "target": program}]
        assert gone([each for each in everybody if each.pid != pid])
        assert psutil.pid_exists(pid) and process.poll() is None
        assert "retired: `overmind stop`" in next(runtime.glob("v*/launcher.log")).read_text()
        assert stop() == {"stopped": False, "daemon_pid": None, "entries": 0, "zygotes": []}
        assert finish(process) == 6
    wait_for(lambda: not processes_of(runtime), 20, "nothing is left")


def test_a_kernel_stops_everything_but_itself(runtime: Path, tmp_path: Path) -> None:
    warm_kernel(runtime, tmp_path, engine="xeus")
    (zygote,) = zygotes(runtime)
    before = plain_starts(runtime)
    with Kernel(tmp_path, "xeus") as kernel:
        assert plain_starts(runtime) == before, "it is a fork"
        assert "; 1 zygote ended" in kernel.run("%overmind stop")
        assert gone([psutil.Process(zygote["pid"])] if psutil.pid_exists(zygote["pid"]) else [])
        assert kernel.run("print(1 + 1)") == "2\n"
        assert "no zygotes" in kernel.run("%overmind status")


def test_a_zygote_that_hangs(runtime: Path, tmp_path: Path) -> None:
    warm(runtime, script(tmp_path, "import decimal"))
    wait_for(lambda: standby_waits(runtime), 20, "a standby")
    (zygote,) = zygotes(runtime)
    everybody = family(zygote["pid"])
    os.kill(zygote["pid"], signal.SIGSTOP)
    assert [row["pid"] for row in stop()["zygotes"]] == [zygote["pid"]]
    wait_for(lambda: gone(everybody), 10, "it and its standby have ended")


def test_a_zygote_that_still_imports(runtime: Path, site_packages: Path, tmp_path: Path) -> None:
    """It listens to nobody yet, and no file but its lock tells of it."""
    (site_packages / "overmind_test_slow.py").write_text(
        "import sys, time\nif sys.argv[1:2] == ['zygote']:\n    time.sleep(600)\n"
    )
    outcome(overmind_run(script(tmp_path, "import overmind_test_slow")))

    def importing() -> list[psutil.Process]:
        return [each for each in processes_of(runtime) if "zygote" in each.cmdline()[:3]]

    wait_for(lambda: bool(importing()), 60, "the zygote begins")
    assert zygotes(runtime) == []
    (process,) = importing()
    assert [row["pid"] for row in stop()["zygotes"]] == [process.pid]
    wait_for(lambda: not processes_of(runtime), 10, "nothing is left")


def test_no_zygote_is_made_for_a_program_that_ends_later(runtime: Path, tmp_path: Path) -> None:
    """A process of the first start waits for the program's end, to become a zygote then."""
    program = script(tmp_path, WAITS)
    with running(program) as (process, _):
        assert len(plain_starts(runtime)) == 1
        assert stop()["zygotes"] == []
        assert finish(process) == 6
    wait_for(lambda: not processes_of(runtime), 20, "nothing is left")
    assert not list(runtime.glob("v*/z*"))
    warm(runtime, program)
    assert forked(runtime, program).code == 6, "and the next start makes one as ever"


def test_status_tells_of_zygotes(runtime: Path, tmp_path: Path) -> None:
    from overmind import commands, display
    from overmind.zygote import census

    assert "no zygotes" in display.status_text(commands.status())
    warm(runtime, script(tmp_path, "import decimal"))
    (zygote,) = zygotes(runtime)

    def told() -> bool:
        (row,) = commands.status()["zygotes"]
        return row["pid"] == zygote["pid"] and row["memory"] > 1.5 * census.memory_of(zygote["pid"]) > 0

    wait_for(told, 20, "the memory of the zygote and of its standby, which share most")
    assert "\n1 zygote with imports ready: " in display.status_text(commands.status())


@pytest.mark.parametrize("text", ["", "no number", "1", pytest.param(str(os.getpid()), id="this process")])
def test_a_lock_that_does_not_tell_whose_it_is(runtime: Path, tmp_path: Path, text: str) -> None:
    """Nobody else is ended for it."""
    from overmind import _core
    from overmind.zygote import stop as ending

    folder = Path(_core.config().instance_dir)
    folder.mkdir(mode=0o700)
    lock = folder / "z0123456789abcdef.lock"
    lock.write_text(text)
    assert ending.end_all(str(folder)) == []
    holds = "import fcntl, sys\nlock = open(sys.argv[1])\nfcntl.flock(lock, 2)\nprint('held', flush=True)\ninput()"
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            [sys.executable, "-c", holds, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder,
    ):
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        patch.setattr(ending, "_ALL", 0.3)
        with pytest.raises(TimeoutError, match="one that just begins"):
            ending.end_all(str(folder))
        holder.communicate(b"\n", timeout=20)
        assert holder.returncode == 0
