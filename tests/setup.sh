#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Brings a fresh Debian 12 or 13 to the point where everything can be built and run: apt packages, .venv, torch, the
# package itself. Each step is skipped when it has nothing to do, so a second run takes under a second.
#
# `tests/setup.sh browser` adds what tests/browser needs: Chromium, JupyterLab, playwright.
#
# PYTHON=... picks the interpreter for a new .venv (default: python3.11 if it is there, else python3).
# torch comes from the package index that pip is configured for; PIP_EXTRA_INDEX_URL can name one with CPU builds.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=${1:-}

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

apt_packages() {
  echo g++ cmake ninja-build pkg-config ccache git libzmq3-dev cppzmq-dev nlohmann-json3-dev libgtest-dev xeus-dev
  [[ $(debian_release) == 12 ]] || echo xeus-zmq-dev  # xeus 2.4 has its sockets itself
  # python3-dev and -venv are for Debian's own interpreter; another one brings its own.
  echo python3-dev python3-venv
  local llvm
  llvm=$(llvm_version)
  echo "clang-$llvm" "clang-tidy-$llvm" "libclang-rt-$llvm-dev"
  [[ $wanted != browser ]] || echo chromium
}

debian_release() { . /etc/os-release && echo "${VERSION_ID:-}"; }

# Debian's default clang of that release.
llvm_version() {
  case "$(debian_release)" in
    12) echo 14 ;;
    *) echo 19 ;;
  esac
}

install_apt_packages() {
  command -v apt-get >/dev/null || { say "no apt-get here: the packages of tests/setup.sh must be there already"; return; }
  local missing=() package
  for package in $(apt_packages); do
    [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || missing+=("$package")
  done
  [[ ${#missing[@]} -eq 0 ]] && return
  say "installing ${missing[*]}"
  local root=()
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || fail "neither root nor sudo; ask an administrator for: apt-get install ${missing[*]}"
    root=(sudo)
  fi
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

pick_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python >= 3.10 found; set PYTHON to one"
}

# What was done to .venv is noted in .venv, so that removing it removes the note.
done_before() { [[ -f .venv/.overmind-$1 && $(<".venv/.overmind-$1") == "$2" ]]; }
note_done() { echo "$2" >".venv/.overmind-$1"; }

hash_of() { sha256sum | cut -d' ' -f1; }

requirements_hash() { { cat pyproject.toml tests/setup.sh; readlink -f .venv/bin/python; } | hash_of; }

# Contents of what is compiled, names of the Python files: an editable install knows the modules it was made with.
native_hash() {
  {
    requirements_hash
    find core kernel_ext CMakeLists.txt -type f | LC_ALL=C sort | xargs sha256sum
    find ipython_magic -name '*.py' | LC_ALL=C sort
  } | hash_of
}

install_requirements() {
  say "installing torch and the requirements of pyproject.toml"
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" torch==2.13.0
  "${pip[@]}" 'scikit-build-core>=0.10' 'pybind11>=2.13'
  "${pip[@]}" --no-build-isolation -e '.[test,lint]'
  install_stable_fast
}

install_browser_requirements() {
  say "installing JupyterLab and playwright"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[browser]'
}

# Built against this torch beforehand: building takes ten minutes. Without the wheel its tests are skipped.
install_stable_fast() {
  local wheel
  for wheel in ../shared/wheels/stable_fast-*.whl; do
    [[ -e $wheel ]] || continue
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$wheel" ||
      say "$wheel does not fit this Python: the tests of stable-fast are skipped"
  done
}

build_package() {
  say "building the package"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
}

install_apt_packages
if [[ ! -x .venv/bin/python ]]; then
  python=$(pick_python)
  say "making .venv with $python"
  "$python" -m venv .venv
fi
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
requirements=$(requirements_hash)
native=$(native_hash)
if ! done_before requirements "$requirements"; then
  install_requirements
  note_done requirements "$requirements"
  note_done native "$native"
elif ! done_before native "$native"; then
  build_package
  note_done native "$native"
fi
if [[ $wanted == browser ]] && ! done_before browser "$requirements"; then
  install_browser_requirements
  note_done browser "$requirements"
fi
