# SPDX-License-Identifier: MIT
"""Kernel, zygote, launcher and server, killed at random moments of a start: a kernel that answers, and nothing is left.

`python tests/benchmarks/restarts.py --kill` plays more rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import random_kills
from starts import ENGINES

ROUNDS = 25


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(900)
def test_killed_at_random_moments(runtime: Path, folder: Path, engine: str) -> None:
    played = list(random_kills.rounds(runtime, folder, engine, ROUNDS, seed=4))
    assert {each.victim for each in played} == set(random_kills.VICTIMS)
    assert {each.said for each in played} >= {"alive", "dead"}
    assert not random_kills.left(runtime)
