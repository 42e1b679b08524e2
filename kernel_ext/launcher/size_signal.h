// SPDX-License-Identifier: MIT
// Writing where the size of files is limited.
#pragma once

#include <csignal>

namespace overmind::launcher {

// While it lives, a write past RLIMIT_FSIZE is an error of that write, not the end of this process.
class NoSizeSignal {
 public:
  NoSizeSignal() { ::sigaction(SIGXFSZ, &ignore_, &before_); }
  ~NoSizeSignal() {
    ::sigaction(SIGXFSZ, &ignore_, nullptr);  // again: drops one that waits because it is blocked
    ::sigaction(SIGXFSZ, &before_, nullptr);
  }
  NoSizeSignal(const NoSizeSignal&) = delete;
  NoSizeSignal& operator=(const NoSizeSignal&) = delete;

 private:
  struct sigaction ignore_ = [] {
    struct sigaction action {};
    action.sa_handler = SIG_IGN;
    return action;
  }();
  struct sigaction before_ {};
};

}  // namespace overmind::launcher
