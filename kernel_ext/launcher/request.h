// SPDX-License-Identifier: MIT
// The conversation with a zygote; messages and their bytes are in README.md.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <string>

#include "core/status.h"
#include "core/unique_fd.h"
#include "kernel_ext/launcher/facts.h"
#include "kernel_ext/launcher/options.h"

namespace overmind::launcher {

// What this process was started with, before main() changes any of it.
struct Inherited {
  sigset_t blocked;
  sigset_t ignored;
  static Inherited now();
};

// A process that was forked for us, and runs.
struct Started {
  UniqueFd connection;  // on which its end is told
  UniqueFd life;        // while this is open it may live
  UniqueFd process;     // pidfd
  pid_t pid = -1;
};

// Asks the zygote at `place` for a fork. Either the fork has been told to run, or it never will: an answer that
// comes late counts for nothing. Errors: kUnavailable (none there, or it refused; the message says why), kTimeout,
// kDenied, kIo.
Result<Started> ask(const Options& options, const Place& place, const Inherited& inherited);

// The next message on a connection; empty when the other end is gone. `attached`, if not null, gets a descriptor.
std::string receive_message(int connection, UniqueFd* attached);

}  // namespace overmind::launcher
