# SPDX-License-Identifier: MIT
"""Random numbers that a load draws from the system: os.urandom, and what stands on it (uuid, secrets, unseeded
generators of `random` and numpy), /dev/urandom, and torch.Generator().seed(), which reads that.

The system keeps no state to compare, so kernel_ext/random_watch.h tells of each draw while it is made. Not every draw
is the load's. Measured with transformers 5.24, diffusers 0.42, sentence-transformers and scikit-learn: modules draw
while they are imported, and the libraries in `_NAMES_ONLY` name files, requests and jobs by what they draw.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from types import FrameType
from typing import Any

from overmind import frames, modules

_LIBRARY = os.path.dirname(random.__file__)
_GENERATORS = frozenset(
    f"{_LIBRARY}/{name}.py" for name in ("random", "secrets", "uuid")
)  # they draw for their callers
_TEMPFILE = f"{_LIBRARY}/tempfile.py"
_NAMES_ONLY = ("/huggingface_hub/", "/joblib/", "/sklearn/callback/", "/torch/_dynamo/")
_UNPICKLING = "/numpy/random/_pickle.py"  # makes a generator, whose state comes right after


class Draws:
    """What one load drew. Notes come from its threads, and are looked at when it is done."""

    def __init__(self) -> None:
        self._source: str | None = None
        self._seeded: list[tuple[Any, Any, str]] = []

    def note(self, source: str, frame: FrameType | None) -> None:
        """A draw from `source` is about to be made by the code of `frame`."""
        if self._source is not None or frame is None or not _is_the_loads(frame):
            return
        pair = _under_construction() if frame.f_code.co_filename == random.__file__ else None
        if pair is None:
            self._source = source
        else:
            self._seeded.append((*pair, source))

    def source(self) -> str | None:
        """What the load drew from, or None.

        numpy.random.RandomState(5) draws a seed and then takes its own instead: the generator has not kept the draw.
        """
        if self._source is not None:
            return self._source
        return next((source for generator, drawn, source in self._seeded if generator._seed_seq is drawn), None)


def _is_the_loads(frame: FrameType) -> bool:
    drawer: FrameType | None = frame
    while drawer is not None and drawer.f_code.co_filename in _GENERATORS:
        drawer = drawer.f_back
    if drawer is None:
        return True
    file = drawer.f_code.co_filename
    if file == _TEMPFILE or file.endswith(_UNPICKLING):
        return False
    if modules.installed_file(file) and any(name in file for name in _NAMES_ONLY):
        return False
    return not frames.importing(drawer)


def _under_construction() -> tuple[Any, Any] | None:
    """numpy's generator and its seed sequence, if that is what draws just now: the one has no seeds yet, the other no
    entropy. Both were made a moment ago, so they are among the youngest objects, unless a collection came between."""
    module = sys.modules.get("numpy.random.bit_generator")
    if module is None:
        return None
    for generation in range(3):
        young = gc.get_objects(generation=generation)
        drawn = next((one for one in reversed(young) if type(one) is module.SeedSequence and one.entropy is None), None)
        generator = next((one for one in reversed(young) if _is_unseeded(one, module.BitGenerator)), None)
        if drawn is not None:
            return None if generator is None else (generator, drawn)
    return None


def _is_unseeded(one: Any, kind: type) -> bool:
    if not issubclass(type(one), kind) or one._seed_seq is not None:
        return False
    # A RandomState(5) that is complete has no seed sequence either. No other's state can be read before it is complete.
    legacy = sys.modules["numpy.random._mt19937"].MT19937
    return not issubclass(type(one), legacy) or not one.state["state"]["key"].any()
