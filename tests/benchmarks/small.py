# SPDX-License-Identifier: MIT
"""The function whose cached result is the smallest one can have."""

from __future__ import annotations


def make(number: int) -> dict[str, int]:
    return {"number": number}
