// SPDX-License-Identifier: MIT
// Threads that never see a signal: an interrupt must reach the main thread, which runs the user's code.
#pragma once

#include <pthread.h>

#include <csignal>

namespace overmind::kernel {

// While one lives, threads made by this thread start with all signals blocked.
class QuietThreads {
 public:
  QuietThreads() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~QuietThreads() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  QuietThreads(const QuietThreads&) = delete;
  QuietThreads& operator=(const QuietThreads&) = delete;

 private:
  sigset_t before_;
};

}  // namespace overmind::kernel
