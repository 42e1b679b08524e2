# SPDX-License-Identifier: MIT
"""python -m overmind.kernel -f {connection_file}"""

import sys

if __name__ == "__main__":
    # -m puts the working folder first; the shell puts "" there itself, which follows os.chdir.
    if sys.path and sys.path[0] not in ("", *sys.path[1:]):
        del sys.path[0]
    from overmind.kernel.app import main

    sys.exit(main(sys.argv[1:]))
