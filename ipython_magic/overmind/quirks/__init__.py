# SPDX-License-Identifier: MIT
"""What one library needs beyond plain pickle: one file per library."""

from __future__ import annotations

from typing import Any

from overmind.quirks import tokenizers, torchscript


def complete(value: Any, state: dict[str, Any]) -> None:
    """Builds what a hit left for later, before somebody looks into `state`, the __dict__ of `value`."""
    if tokenizers.unbuilt(state):
        tokenizers.build(value)
    elif torchscript.PENDING in state:
        torchscript.build(value)
