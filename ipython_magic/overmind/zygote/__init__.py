# SPDX-License-Identifier: MIT
"""Starts that take no time: a process that has the imports done is forked for each. kernel_ext/launcher/README.md
says how the processes work together.

`boot.py` is run, not imported: by the launcher for a plain start, and for a zygote. `server.py` is the zygote,
`preload.py` and `stash.py` are its imports, `become.py` turns a fork into what was asked for, `profile.py` learns.
"""
