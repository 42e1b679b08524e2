# SPDX-License-Identifier: MIT
"""Programs started natively, and by `overmind run`: plainly, and from a zygote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import wait_for

WARM_SECONDS = 120  # imports of torch on a busy machine


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


def warm(runtime: Path, *words: str, **options: Any) -> Outcome:
    """Runs it plainly once, and returns when its zygote waits for the next start."""
    before = {row["pid"] for row in zygotes(runtime)}
    done = outcome(overmind_run(*words), **options)
    wait_for(lambda: bool({row["pid"] for row in zygotes(runtime)} - before), WARM_SECONDS, f"a zygote waits for {words}")
    return done


def plain_starts(runtime: Path) -> list[str]:
    """The launcher's reasons for plain starts so far."""
    return [line for log in runtime.glob("v*/launcher.log") for line in log.read_text().splitlines() if "plain" in line]


def forked(runtime: Path, *words: str, **options: Any) -> Outcome:
    """`overmind run words`, which must be a fork of a zygote."""
    before = plain_starts(runtime)
    done = outcome(overmind_run(*words), **options)
    assert plain_starts(runtime) == before, "it was a plain start"
    return done
