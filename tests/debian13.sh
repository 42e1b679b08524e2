#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Builds and tests in a Debian 13 root, build/debian13: xeus 5 with xeus-zmq, gcc 14, clang 19. Everything that
# tests/run_all.sh does, with the Python tests of the kernel and of its starts; arguments are pytest's instead of these.
#
# The first run makes the root by debootstrap, from the mirror that apt has here, and all that tests/setup.sh makes.
# The root has a .venv and a build folder of its own, under its /srv; the sources, this machine's Python, and what
# pip's configuration names are mounted into it, in a mount namespace of their own: nothing stays mounted.
# PYTHON=... picks another interpreter for a new .venv; `PYTHON=/usr/bin/python3` is Debian 13's.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD/build/debian13
tests=(tests/system/test_kernel*.py tests/starts tests/python/test_kernelspec.py)

say() { echo "debian13: $*" >&2; }
fail() { say "$*"; exit 1; }

# The mirror of Debian itself among apt's sources.
mirror() {
  local uris
  uris=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian')
  [[ -n $uris ]] || fail "apt knows no mirror of Debian; is there one in its sources, and was apt-get update run?"
  head -n 1 <<<"$uris"
}

make_root() {
  [[ -d $root ]] && return
  command -v debootstrap >/dev/null || apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
  say "making a Debian 13 root in $root"
  rm -rf "$root.new"
  mkdir -p "$root.new"
  # What debootstrap mounts goes with it, too. Certificates now: they can't be installed once this machine's lie there.
  unshare --mount debootstrap --variant=minbase --include=ca-certificates trixie "$root.new" "$(mirror)" \
    >"$root.log" 2>&1 || { tail "$root.log"; exit 1; }
  mkdir "$root.new/srv/build" "$root.new/srv/venv"
  mv "$root.new" "$root"
}

pick_python() {
  local candidate
  for candidate in ${PYTHON:-.venv/bin/python python3.11 python3}; do
    "$candidate" -c 'import sys; print(f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}")' \
      2>/dev/null && return
  done
  fail "no Python found; set PYTHON to one"
}

# Files and folders that pip's configuration consists of and names; of a package index, the folder around it.
pip_places() {
  "$1" -m pip config debug | grep -oE "(file://)?/[^ ,']+" | sed -E 's,^file://,,; s,/simple/?$,,' | sort -u
}

# $1, or $2, as $1 in the root.
mount_in() {
  if [[ -d ${2:-$1} ]]; then
    mkdir -p "$root$1"
  else
    mkdir -p "$(dirname "$root$1")"
    touch "$root$1"
  fi
  mount --rbind "${2:-$1}" "$root$1"
}

# The first process of the new namespaces.
mount_and_run() {
  local python place
  python=$(pick_python)
  mount_in /dev
  mount -t tmpfs tmpfs "$root/dev/shm"
  mount_in /sys
  mount_in /etc/resolv.conf
  for place in $(pip_places "$python"); do
    [[ ! -e $place ]] || mount_in "$place"
  done
  # Debian's own interpreter is the root's, not this machine's.
  [[ $python == /usr/* ]] || mount_in "$(dirname "$(dirname "$python")")"
  mkdir -p .venv
  mount --bind . "$(mkdir -p "$root$PWD" && echo "$root$PWD")"
  mount --bind "$root/srv/venv" "$root$PWD/.venv"
  mkdir -p "$root/srv/build/models" build/models
  mount --bind "$root/srv/build" "$root$PWD/build"
  mount --bind build/models "$root$PWD/build/models"
  [[ ! -d ../shared/wheels ]] || mount_in "$(realpath ../shared/wheels)"
  # Not by exec: this shell stays, to take in the processes whose parents are gone.
  PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 PYTHON=$python chroot "$root" "$PWD/tests/debian13.sh" in-root "$@"
}

build_and_test() {
  tests/setup.sh
  .venv/bin/python - <<-'END'
	import sys
	from overmind._kernel import XEUS_VERSION
	print("== Debian 13: xeus", XEUS_VERSION, "Python", sys.version)
	assert int(XEUS_VERSION.split(".")[0]) >= 5
	END
  [[ $# -gt 0 ]] || set -- "${tests[@]}"
  exec tests/run_all.sh "$@"
}

case ${1:-} in
  in-namespace) mount_and_run "${@:2}" ;;
  in-root) build_and_test "${@:2}" ;;
  *)
    [[ $(id -u) -eq 0 ]] || fail "only root can make a root of Debian 13"
    mkdir -p build
    exec 9>"$root.lock"
    flock -n 9 || fail "another one is at work in $root"
    make_root
    find "$root/tmp" -xdev -mindepth 1 -delete  # now, before anything is mounted
    unshare --mount --pid --fork --kill-child --mount-proc="$root/proc" "$0" in-namespace "$@" 9>&-
    ;;
esac
