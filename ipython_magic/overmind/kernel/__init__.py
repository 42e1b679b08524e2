# SPDX-License-Identifier: MIT
"""The Jupyter kernel: an IPython shell behind channels that xeus owns (overmind._kernel).

`python -m overmind.kernel -f FILE` runs one. app.py starts it, kernel.py answers requests, execution.py runs cells,
shell.py is the shell with its displays, streams.py its stdout and stderr, comms.py its comms.
"""
