# SPDX-License-Identifier: MIT
"""The main module of a plain start and of a zygote: `python boot.py plain ...`, `python boot.py zygote ...`.

Both end by leaving it: what runs then finds sys.modules and sys.path as `python script.py` has them, after
`import overmind; overmind.enable()`.
"""

import atexit
import sys

at_end = []  # type: ignore[var-annotated]
atexit.register(lambda calls: [call() for call in calls], at_end)  # registered first, so it is called last
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder

from overmind.zygote import entry  # noqa: E402

entry.main(sys.argv[1:], at_end)
