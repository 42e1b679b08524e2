#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# All tests: the C++ ones plain, under ASan+UBSan and under TSan, one minute of fuzzing, then pytest, whose closing
# line is the last. Stops at the first level that fails. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."

export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

# TSan of gcc 12 and clang 14 can't start where the kernel randomises mappings by more than 28 bits.
fixed_layout=()
setarch "$(uname -m)" -R true 2>/dev/null && fixed_layout=(setarch "$(uname -m)" -R)

configure() {
  local folder=$1
  shift
  cmake -S . -B "$folder" -GNinja -DOVERMIND_PYTHON=OFF "$@" >"$folder.log" 2>&1 || { cat "$folder.log"; return 1; }
}

cpp_tests() {
  local folder=build/$1
  shift
  echo "== C++ tests: $folder"
  configure "$folder" -DOVERMIND_TESTS=ON "$@"
  # The build runs each test program to list its tests.
  "${fixed_layout[@]}" cmake --build "$folder"
  "${fixed_layout[@]}" ctest --test-dir "$folder" --output-on-failure --timeout 300
}

fuzz() {
  echo "== fuzzers"
  local clang
  clang=$(compgen -c clang++- | sort -V | tail -1 || true)
  # The libraries are instrumented too, or the fuzzer would see nothing of the decoders.
  configure build/fuzz -DOVERMIND_FUZZ=ON "${checked[@]}" -DCMAKE_CXX_COMPILER="${clang:-clang++}" \
    "-DOVERMIND_SANITIZE=fuzzer-no-link;address;undefined"
  cmake --build build/fuzz --target fuzz_manifest fuzz_protocol
  local name
  for name in fuzz_manifest fuzz_protocol; do
    mkdir -p "build/fuzz/corpus/$name"
    "build/fuzz/tests/fuzz/$name" -max_total_time=30 -print_final_stats=1 -artifact_prefix="build/fuzz/$name-" \
      "build/fuzz/corpus/$name" >"build/fuzz/$name.log" 2>&1 || { tail -60 "build/fuzz/$name.log"; return 1; }
    grep -E 'number_of_executed_units' "build/fuzz/$name.log" | sed "s/^stat::/$name: /"
  done
}

# Instrumented code: -O1 and line numbers only; -O2 -g takes twice as long to compile (protocol.cc 51 s, 24 s).
checked=(-DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1")

mkdir -p build
cpp_tests cpp -DCMAKE_BUILD_TYPE=Debug
cpp_tests asan "${checked[@]}" "-DOVERMIND_SANITIZE=address;undefined"
cpp_tests tsan "${checked[@]}" -DOVERMIND_SANITIZE=thread
fuzz
echo "== Python tests"
# Many tests wait for processes; up to four files at a time, as far as there are cores.
exec .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile "$@"
