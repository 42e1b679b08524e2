# SPDX-License-Identifier: MIT
"""python -m overmind.kernel -f {connection_file}"""

import sys

if __name__ == "__main__":
    # -m puts the working folder first; the shell puts "" there itself, which follows os.chdir.
    if sys.path and sys.path[0] not in ("", *sys.path[1:]):
        del sys.path[0]
    try:
        from overmind.kernel.app import main
    except ImportError as error:
        from overmind.kernel import kernelspec

        sys.exit(f"overmind kernel: {kernelspec.missing() or error}")
    sys.exit(main(sys.argv[1:]))
