// SPDX-License-Identifier: MIT
// Life of overmindd around the server: one instance per folder, detached from whoever started it, a
// report of how starting ended, then keeper and server (keeper.h).
#pragma once

#include "core/config.h"
#include "core/status.h"

namespace overmind {

enum class DaemonExit : int { kOk = 0, kFailed = 1, kUsage = 2, kAlreadyRunning = 3 };

struct DaemonOptions {
  Config config;
  int ready_fd = -1;     // gets the StartReport; without it, it goes to stderr
  int adopt_server = 0;  // process that lost its keeper; the descriptors come as kAdopted* below
};

// Descriptors of a keeper that a server starts.
constexpr int kAdoptedLock = 3, kAdoptedListener = 4, kAdoptedSocket = 5;

// Returns in the starting process once the daemon is detached, and in keeper and server at their end.
DaemonExit run_daemon(DaemonOptions options);

}  // namespace overmind
