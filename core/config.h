// SPDX-License-Identifier: MIT
// Every path, limit and environment variable of Overmind is read here, and only here. Python gets
// the same values through overmind._core.config().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace overmind {

constexpr int kProtocolVersion = 2;
// OVERMIND_VERSION comes from pyproject.toml through CMake: the only version number.

struct Config {
  bool disabled = false;       // OVERMIND_DISABLE=1: every load is native, nothing is started
  bool zygote = true;          // OVERMIND_ZYGOTE=0: every start is a plain one
  std::string runtime_dir;     // OVERMIND_RUNTIME_DIR, else $XDG_RUNTIME_DIR/overmind, else /tmp/overmind-$UID
  std::string budget = "50%";  // OVERMIND_BUDGET: bytes, "16GiB", or a share of the memory available to the cgroup
  std::string log_level = "warning";  // OVERMIND_LOG: debug, info, warning, error
  std::string daemon_path;            // overmindd; set by the Python package, which knows where it is installed
  double idle_exit_seconds = 0;       // `overmind start --idle-exit`: without a connection; 0: never

  // Inside runtime_dir, one folder per version, so that two versions never meet.
  std::string instance_dir() const;  // runtime_dir/v<version>-p<protocol>
  std::string socket_path() const;   // instance_dir/socket
  std::string events_path() const;   // instance_dir/events (ZeroMQ ipc)
  std::string lock_path() const;     // instance_dir/lock: held by the daemon for its life
  std::string start_lock_path() const;
  std::string log_path() const;
  std::string launcher_log_path() const;  // why starts were plain, and what zygotes did

  // Unset or empty variables give the defaults. Errors: kInvalid, naming the variable and its form.
  static Result<Config> from_environment();
};

// Whether a variable is one of ours that tells where a result goes and what is said about it, but changes no result:
// OVERMIND_BUDGET and OVERMIND_LOG. Others are part of what a process is.
bool is_own_free_variable(std::string_view name);

// "16GiB", "1.5G" (binary too), "512MB" (decimal), "1000000", "50%" (of `available`). Errors: kInvalid.
Result<std::uint64_t> parse_budget(const std::string& text, std::uint64_t available);

// Memory that this process's cgroup (v2 or v1, and every one above it) and the machine can still give, plus
// page cache that they can drop; bytes. `prefix` goes before /proc and /sys, for tests.
std::uint64_t available_memory(const std::string& prefix = "");

// Creates `path` (not its parents) 0700 if missing; refuses a symlink, a foreign owner, or a mode open to others.
// Errors: kDenied, kIo.
Status ensure_private_dir(const std::string& path);

}  // namespace overmind
