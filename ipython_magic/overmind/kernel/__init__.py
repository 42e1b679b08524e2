# SPDX-License-Identifier: MIT
"""The Jupyter kernel: an IPython shell behind channels that xeus owns (overmind._kernel).

`python -m overmind.kernel -f FILE` runs one. app.py starts it, kernel.py answers requests, execution.py runs cells,
shell.py is the shell with its displays, streams.py its stdout and stderr, comms.py its comms.
"""

NAME = "overmind"
DISPLAY_NAME = "Python 3 (Overmind)"

# What programs that a cell runs can do: colours yes, paging no. ipykernel sets the same.
ENVIRONMENT = {
    "TERM": "xterm-color",
    "CLICOLOR": "1",
    "FORCE_COLOR": "1",
    "CLICOLOR_FORCE": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}
MPLBACKEND = "module://matplotlib_inline.backend_inline"  # unless the user says another
