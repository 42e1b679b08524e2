# SPDX-License-Identifier: MIT
"""Magics that a frontend answers, or that differ from a terminal's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from IPython.core import page
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magics import CodeMagics
from IPython.core.magics.code import MacroToEdit
from IPython.display import Javascript, display


@magics_class
class KernelMagics(Magics):  # type: ignore[misc]
    @line_magic  # type: ignore[untyped-decorator]
    def edit(self, parameter_s: str = "", last_call: list[str] | None = None) -> None:
        """Opens a file, or the file of an object, in the frontend's editor: %edit [-p] [-r] NAME, FILE or lines of
        the history."""
        options, args = self.parse_options(parameter_s, "prn:")
        try:
            found = CodeMagics._find_edit_target(self.shell, args, options, last_call or ["", ""])
        except MacroToEdit:
            print("Macro editing not yet implemented in 2-process model.")
            return
        filename, line, _temporary = found
        payload = {"source": "edit_magic", "filename": str(Path(filename).resolve()), "line_number": line}
        self.shell.payload_manager.write_payload(payload)

    @line_magic  # type: ignore[untyped-decorator]
    def clear(self, _line: str) -> None:
        """Clears the terminal."""
        self.shell.system("clear")

    cls = line_magic("cls")(clear)

    @line_magic  # type: ignore[untyped-decorator]
    def less(self, line: str) -> None:
        """Shows a file in the frontend's pager."""
        if not line:
            raise UsageError("Missing filename.")
        text = Path(line).read_text()
        page.page(self.shell.pycolorize(text) if line.endswith(".py") else text)

    more = line_magic("more")(less)

    @line_magic  # type: ignore[untyped-decorator]
    def man(self, line: str) -> None:
        """Shows a manual page in the frontend's pager."""
        page.page(self.shell.getoutput(f"man {line} | col -b", split=False))

    @line_magic  # type: ignore[untyped-decorator]
    def connect_info(self, _line: str) -> None:
        """Shows how another client can be connected to this kernel."""
        file = Path(self.shell.kernel.connection_file)
        print(
            f"{file.read_text()}\n\nPaste this into a file, and connect with:\n    $> jupyter <app> --existing <file>"
        )
        print(f"or, on this machine:\n    $> jupyter <app> --existing {file}")

    @line_magic  # type: ignore[untyped-decorator]
    def qtconsole(self, line: str) -> None:
        """Opens a qtconsole that is connected to this kernel."""
        file = str(self.shell.kernel.connection_file)
        subprocess.Popen([sys.executable, "-m", "qtconsole", "--existing", file, *line.split()], start_new_session=True)

    @line_magic  # type: ignore[untyped-decorator]
    def autosave(self, line: str) -> None:
        """Sets the autosave interval of the classic notebook, in seconds; 0 switches it off."""
        try:
            interval = int(line)
        except ValueError as error:
            raise UsageError(f"%autosave requires an integer, got {line!r}") from error
        script = f"IPython.notebook.set_autosave_interval({1000 * interval})"
        display(Javascript(script), include=["application/javascript"])
        print(f"Autosaving every {interval} seconds" if interval else "Autosave disabled")
