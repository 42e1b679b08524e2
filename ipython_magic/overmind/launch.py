# SPDX-License-Identifier: MIT
"""The `overmind` command's first lines, and the command line of the launcher.

`overmind run` must cost no more than an interpreter's start, so it is told apart before anything is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(*words: str) -> list[str]:
    """The launcher's command line for this interpreter and this installation."""
    from overmind import _core

    launcher = Path(_core.__file__).with_name("overmind-launch")
    boot = Path(__file__).parent / "zygote" / "boot.py"
    return [str(launcher), f"--python={sys.executable}", f"--boot={boot}", *words]


def main() -> None:
    """Entry point of the `overmind` command."""
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in ([], ["-h"], ["--help"]) and sys.argv[2:] != ["-m"]:
        run(sys.argv[2:])
    from overmind.cli import main as verbs

    verbs()


def run(words: list[str]) -> None:
    """Becomes the launcher. Returns if the launcher can't be run, after saying so."""
    argv = command("run", *words)
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        sys.exit(f"overmind: can't run {argv[0]} ({error.strerror}); reinstall overmind-jupyter for this Python")
