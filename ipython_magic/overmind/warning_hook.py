# SPDX-License-Identifier: MIT
"""How Overmind hears what is warned of: over whatever stands at warnings.showwarning, and away again."""

from __future__ import annotations

import warnings
from typing import Any


class WarningHook:
    """In the place of warnings.showwarning, from its making to remove()."""

    def __init__(self) -> None:
        self._show = warnings.showwarning
        self._installed = self._show_warning  # a bound method is made anew at each access
        warnings.showwarning = self._installed

    def remove(self) -> None:
        """Restores what was there, unless somebody has put his own over it: that one still calls this."""
        if warnings.showwarning is self._installed:
            warnings.showwarning = self._show

    def takes(self, warning: tuple[Any, ...]) -> bool:
        """Whether this one is not to be shown; `warning` is what warnings.showwarning() takes, all six of it."""
        raise NotImplementedError

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        warning = (message, category, filename, lineno, file, line)
        if not self.takes(warning):
            self._show(*warning)
