#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Style and types. Changes nothing; `ruff format` and `clang-format -i` do what it asks for.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
find core kernel_ext tests -name '*.cc' -o -name '*.h' | LC_ALL=C sort | xargs .venv/bin/clang-format --dry-run -Werror
cmake -S . -B build/cpp -GNinja -DOVERMIND_PYTHON=OFF -DOVERMIND_TESTS=ON -DCMAKE_BUILD_TYPE=Debug >/dev/null
tidy=$(compgen -c clang-tidy- | grep -E '^clang-tidy-[0-9]+$' | sort -V | tail -1 || true)
find core -name '*.cc' | LC_ALL=C sort | xargs -P "$(nproc)" -n 4 "${tidy:-clang-tidy}" -p build/cpp --quiet --extra-arg=-Wno-unknown-warning-option
