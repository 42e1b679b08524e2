// SPDX-License-Identifier: MIT
// Reaching the daemon, and starting it when there is none. Starting is a handshake: the starter waits
// for one line that says how it ended, so a failure comes with the daemon's own reason.
// Thread safety: any thread; two starters, in one process or in two, make one daemon.
#pragma once

#include <string>
#include <vector>

#include "core/config.h"
#include "core/status.h"
#include "core/unique_fd.h"
#include "core/unix_socket.h"

namespace overmind {

// A connection to the daemon of this user and version, its peer checked. With `start`, a missing
// daemon is started first. Errors: kUnavailable, kDenied (folder, lock, or peer of another user),
// kTimeout, kInvalid (socket path too long).
Result<UniqueFd> connect_daemon(const Config& config, bool start);

// Waits until no process of the daemon is left. Errors: kTimeout, kDenied, kIo.
Status wait_until_gone(const Config& config, Deadline deadline);

// ---- what starter and daemon share

// How starting ended; the one line that goes through the ready pipe.
struct StartReport {
  enum class Outcome { kOk, kAlreadyRunning, kFailed };
  Outcome outcome = Outcome::kFailed;
  Status failure;  // of kFailed

  std::string to_line() const;                            // with its newline
  static StartReport from_line(const std::string& line);  // anything unknown is kFailed
};

// The options that make overmindd see the same Config.
std::vector<std::string> daemon_arguments(const Config& config);

// Opens or makes a 0600 file to lock. Errors: kDenied (symlink, foreign owner), kIo.
Result<UniqueFd> open_lock_file(const std::string& path);

}  // namespace overmind
