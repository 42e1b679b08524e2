# SPDX-License-Identifier: MIT
"""The names of cells as files: what tracebacks, warnings and debuggers call them."""

from __future__ import annotations

import os
import tempfile

from IPython.core.compilerop import CachingCompiler

from overmind import _kernel

HASH_SEED = 0xC70F6907
SUFFIX = ".py"


def prefix() -> str:
    """Where the files would be. The folder's name is ipykernel's: numba's cache and others know cells by it."""
    return os.path.join(tempfile.gettempdir(), f"ipykernel_{os.getpid()}") + os.sep


def name_of(code: str) -> str:
    """The file that a cell with this text would be; debuggers make it, nobody else does."""
    chosen = os.environ.get("IPYKERNEL_CELL_NAME")
    return chosen if chosen is not None else f"{prefix()}{_kernel.murmur2(code, HASH_SEED)}{SUFFIX}"


class CellCompiler(CachingCompiler):  # type: ignore[misc]
    def get_code_name(self, raw_code: str, _transformed_code: str, _number: int) -> str:
        return name_of(raw_code)
