# SPDX-License-Identifier: MIT
"""Overmind's own messages: one logger, one line shape, on stderr."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

logger = logging.getLogger("overmind")

_said: set[str] = set()


class _Stderr(logging.StreamHandler[TextIO]):
    """Looks sys.stderr up at each line: a notebook replaces it, and a captured one may be closed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("overmind: %(message)s"))

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _value: TextIO) -> None:
        """The stream is never fixed."""


def configure(level: str) -> None:
    """Sets the level by its name in OVERMIND_LOG. Idempotent; leaves a logger that the user configured alone."""
    if not logger.handlers:
        logger.addHandler(_Stderr())
        logger.propagate = False
    logger.setLevel(level.upper())


def warn_once(message: str) -> None:
    """One warning line for one cause in the life of this process."""
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)
