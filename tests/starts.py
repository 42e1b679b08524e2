# SPDX-License-Identifier: MIT
"""Programs started natively, and by `overmind run`: plainly, and from a zygote."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from conftest import wait_for
from kernel_sessions import Session, session
from overmind.kernel import kernelspec

ENGINES = ["ipykernel", *(["xeus"] if importlib.util.find_spec("overmind._kernel") else [])]
WARM_SECONDS = 120  # imports of torch on a busy machine
LEARNED = 1000  # modules; torch alone has more, a kernel without libraries has 250


@dataclass(frozen=True)
class Outcome:
    """What a program left to see."""

    code: int
    out: str
    err: str


def overmind_run(*words: str) -> list[str]:
    """The command line of `overmind run words`."""
    from overmind import launch

    return launch.command("run", *words)


def outcome(command: Sequence[str], **options: Any) -> Outcome:
    """Runs `command` to its end."""
    options.setdefault("stdin", subprocess.DEVNULL) if "input" not in options else None
    done = subprocess.run(command, capture_output=True, timeout=options.pop("timeout", 120), **options)
    return Outcome(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def native(*words: str, **options: Any) -> Outcome:
    """`python words`."""
    return outcome([sys.executable, *words], **options)


def zygotes(runtime: Path) -> list[dict[str, Any]]:
    """The zygotes that live in this runtime folder and have their imports done."""
    from overmind.zygote import census

    return [row for folder in runtime.glob("v*") for row in census.read(str(folder)) if os.path.exists(row["socket"])]


def standby_waits(runtime: Path, count: int = 1, modules: int = 0) -> bool:
    """Whether at least `count` zygotes with so many modules are there, and each zygote has a process forked ahead."""
    rows = zygotes(runtime)
    count_of_big = sum(row["modules"] >= modules for row in rows)
    with contextlib.suppress(psutil.NoSuchProcess):
        return count_of_big >= count and all(psutil.Process(row["pid"]).children() for row in rows)
    return False


@contextlib.contextmanager
def ended_zygotes(runtime: Path) -> Iterator[None]:
    """Ends, by their pids, the zygotes that live in this folder after the block."""
    try:
        yield
    finally:
        for row in zygotes(runtime):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(row["pid"])
                process.terminate()
                process.wait(30)


def caught_up(runtime: Path, but: Collection[int] = ()) -> bool:
    """Whether a zygote (other than those with these pids) has imported all that was learned by now, and waits. True
    only after the last program ended."""
    from overmind.zygote import profile

    learned = [profile.stamp_of(str(path)) for path in runtime.glob("v*/p*") if "." not in path.name]
    return any(row["learned"] in learned and row["pid"] not in but for row in zygotes(runtime))


def warm(runtime: Path, *words: str, **options: Any) -> Outcome:
    """Runs it plainly once, and returns when its zygote waits for the next start."""
    before = {row["pid"] for row in zygotes(runtime)}
    done = outcome(overmind_run(*words), **options)
    wait_for(lambda: caught_up(runtime, but=before), WARM_SECONDS, f"a zygote waits for {words}")
    return done


def plain_starts(runtime: Path) -> list[str]:
    """The launcher's reasons for plain starts so far."""
    return [line for log in runtime.glob("v*/launcher.log") for line in log.read_text().splitlines() if "plain" in line]


def gone(pid: int) -> bool:
    """Whether the process has ended, waited for or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def has_torch(pid: int) -> bool:
    """Whether libtorch is loaded in that process: a zygote without it would show nothing of it."""
    return "/libtorch" in Path(f"/proc/{pid}/maps").read_text()


def refused(runtime: Path) -> dict[str, str]:
    """What zygotes of this folder don't import ahead, and why."""
    found: dict[str, str] = {}
    for path in runtime.glob("v*/p*"):
        if "." not in path.name:
            found.update(json.loads(path.read_text())["refused"])
    return found


def soon_forked(runtime: Path, *words: str, **options: Any) -> Outcome:
    """The same, when the zygote may be beginning anew just now."""
    found: list[Outcome] = []

    def tried() -> bool:
        before = plain_starts(runtime)
        found.append(outcome(overmind_run(*words), **options))
        return plain_starts(runtime) == before

    wait_for(tried, WARM_SECONDS, f"{words} is started from a zygote")
    assert set(found) == {found[-1]}, "plain starts and forks differ"
    return found[-1]


def forked(runtime: Path, *words: str, **options: Any) -> Outcome:
    """`overmind run words`, which must be a fork of a zygote."""
    before = plain_starts(runtime)
    done = outcome(overmind_run(*words), **options)
    assert plain_starts(runtime) == before, f"it was a plain start: {plain_starts(runtime)[-1]}"
    return done


class Kernel:
    """A kernel under a KernelManager, as a notebook server runs it. Use it in a `with`."""

    def __init__(self, folder: Path, engine: str = "ipykernel", **options: Any) -> None:
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        spec = folder / "specs" / "under-test"
        spec.mkdir(parents=True, exist_ok=True)
        argv = kernelspec.argv(engine)
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "x", "language": "python"}))
        specs = KernelSpecManager(kernel_dirs=[str(folder / "specs")], ensure_native_kernel=False)
        self.manager = KernelManager(kernel_name="under-test", kernel_spec_manager=specs)
        self.manager.start_kernel(**options)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    @property
    def launcher(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def run(self, code: str, timeout: float = 60) -> str:
        """Runs a cell; returns what it printed. AssertionError if it raised something else than KeyboardInterrupt."""
        printed = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, timeout=timeout, output_hook=hook)["content"]
        assert reply["status"] == "ok" or reply["ename"] == "KeyboardInterrupt", reply
        return "".join(printed) + (reply["ename"] if reply["status"] != "ok" else "")

    def restart(self) -> None:
        self.manager.restart_kernel(now=False)
        self.client.wait_for_ready(timeout=60)


@contextlib.contextmanager
def forked_session(runtime: Path, engine: str = "xeus", **options: Any) -> Iterator[Session]:
    """A kernel that must be a fork of a zygote, with all of its messages."""
    before = plain_starts(runtime)
    with session(kernelspec.argv(engine), zygote=True, **options) as running:
        assert plain_starts(runtime) == before, f"it was a plain start: {plain_starts(runtime)[-1]}"
        yield running


def warm_kernel(runtime: Path, folder: Path, cells: str = "1", engine: str = "ipykernel", **options: Any) -> None:
    """Runs `cells` in a kernel that is started plainly, and returns when a zygote waits for the next."""
    before = {row["pid"] for row in zygotes(runtime)}
    with Kernel(folder, engine, **options) as kernel:
        kernel.run(cells)
    wait_for(lambda: caught_up(runtime, but=before), WARM_SECONDS, "a zygote waits for kernels")
