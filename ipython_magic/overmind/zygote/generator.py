# SPDX-License-Identifier: MIT
"""The generator of the module `random`: whether numbers were only drawn from it, or it was seeded.

Some imports draw from it (rich makes an id for each of its styles; scikit-learn imports rich). That can be seen only
in a program that seeded it before such an import; in any other, its numbers are anybody's guess with or without them.
"""

from __future__ import annotations

import sys
from typing import Any

SEEDED = "random.seed()"  # stands for this among the variables that a program changed
_WORDS = 624  # of the Mersenne Twister's state; the number behind them is the position
_MOST = 2000 * _WORDS  # numbers that are looked through: 10 ms; whoever drew more counts as a seeder


def state(module: Any = None) -> Any:
    """What `random` is at, this one or that of sys.modules; None if it isn't imported, or is a file of the user's."""
    module = module or sys.modules.get("random")
    generator = getattr(module, "_inst", None)  # not there while the module is being imported
    return generator.getstate() if generator and type(generator) is getattr(module, "Random", None) else None


def only_drawn(before: Any, after: Any) -> bool:
    """Whether drawing alone leads from one state to the other."""
    if before == after:
        return True
    (version, words, _), (_, wanted, _) = before, after
    twin: Any = sys.modules["random"].Random()
    twin.setstate((version, words, None))
    twin.getrandbits(32 * ((wanted[-1] - words[-1]) % _WORDS))
    for _ in range(_MOST // _WORDS):
        if twin.getstate()[1] == wanted:
            return True
        twin.getrandbits(32 * _WORDS)
    return False
