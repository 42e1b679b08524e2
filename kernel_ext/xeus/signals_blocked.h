// SPDX-License-Identifier: MIT
// Where no signal is to be handled: in threads of ours (an interrupt must reach the main thread, which runs the user's
// code), and in calls that don't bear one.
#pragma once

#include <pthread.h>

#include <csignal>

namespace overmind::kernel {

// While one lives, this thread has all signals blocked, and threads that it makes start so.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace overmind::kernel
