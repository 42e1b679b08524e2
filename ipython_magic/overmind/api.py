# SPDX-License-Identifier: MIT
"""The names that users of the published write-up know."""

from __future__ import annotations

from overmind import enable, load

__all__ = ["load", "monkey_patch_all"]


def monkey_patch_all() -> bool:
    """The same as `overmind.enable()`."""
    return enable()
