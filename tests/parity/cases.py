# SPDX-License-Identifier: MIT
"""A load that is compared with the native one, and the program that a fresh process runs for it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
from fresh import Fresh

# `load` is overmind.load where Overmind is on, and a plain call where it is not.
BEFORE = """
import sys
import torch
from describe import describe
from parity.cases import saved
load = sys.modules["overmind"].load if "overmind" in sys.modules else (lambda fn, /, *a, **k: fn(*a, **k))
"""


def rooted(folder: object) -> str:
    """The beginning of a program that imports from `folder`, which it calls root."""
    return f"root = {str(folder)!r}\n{BEFORE}\nsys.path.insert(0, root)\n"


@dataclass(frozen=True)
class Load:
    """One row of a table: what is loaded, how, and what is asked of the result besides its description."""

    name: str
    expression: str
    """The load. Every small model's folder is a variable: `tiny_bert`; so is `made`, the folder that MAKE filled."""
    probe: str = "None"
    """An expression over the loaded `m`, evaluated after it was described."""
    setup: str = ""
    """Statements before the load: imports."""
    bypass: str = ""
    """Why a native load is right here too. Empty: the second process must have a hit."""

    def prepared(self, setup: str) -> Load:
        """The same with statements that every row of a table begins with."""
        return replace(self, setup=f"{setup}\n{self.setup}")


def fill(fresh: Fresh, folder: Path, make: str) -> str:
    """Runs `make`, natively, in a process of its own; it writes checkpoints into `made`."""
    fresh.run(names(str(folder)) + make, on=False)
    return str(folder)


def names(made: str = "") -> str:
    """Assignments of the folders that a program may use."""
    folders = {name: str(models.folder(name)) for name in models.MAKERS if name.startswith("tiny_")}
    return "".join(f"{name} = {folder!r}\n" for name, folder in {**folders, "made": made}.items())


def program(load: Load, made: str = "") -> str:
    """The source for `oracle`: loads, then leaves a full description in `value`."""
    return "\n".join(
        [
            names(made) + BEFORE,
            load.setup,
            f"m = {load.expression}",
            "value = {'object': describe(m)}",
            f"value['probe'] = describe({load.probe})",
        ]
    )


def compare(oracle: Any, load: Load, made: str = "") -> None:
    """The whole test of one row: native, first and second process come to the same."""
    ask = oracle.by if load.bypass else oracle.hit
    ask(program(load, made))


def saved(obj: Any, **options: Any) -> dict[str, str]:
    """What `save_pretrained` writes, file by file. Used inside the programs."""
    from describe import folder_bytes

    with tempfile.TemporaryDirectory() as folder:
        obj.save_pretrained(folder, **options)
        return folder_bytes(folder)
