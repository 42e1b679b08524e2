# Every target does its own set-up (tests/setup.sh): apt packages, .venv, torch, build. The second time that is quick.
.PHONY: demo test test-browser test-debian13 test-older bench lint clean setup

setup:
	@tests/setup.sh

demo: setup  ## restart a real kernel, with and without Overmind
	@.venv/bin/python tests/demo.py

test: setup  ## everything: C++, sanitizers, fuzzers, Python
	@tests/run_all.sh

test-browser:  ## the kernel in JupyterLab, before a real Chromium; screenshots in build/
	@tests/setup.sh browser
	@.venv/bin/python -m pytest tests/browser

test-debian13:  ## the kernel in a Debian 13 root, with xeus 5: made by debootstrap, in build/; wants to be root
	@tests/debian13.sh

test-older: setup  ## loads by transformers and diffusers of two years ago, in an environment of their own, in build/
	@tests/older.sh

bench: setup  ## the table of figures, and build/bench.json
	@.venv/bin/python tests/benchmarks/run.py

lint: setup  ## style and types, C++ and Python
	@tests/lint.sh

clean:  ## everything that was built; the environment stays
	rm -rf build
