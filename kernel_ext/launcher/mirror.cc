// SPDX-License-Identifier: MIT
#include "kernel_ext/launcher/mirror.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "core/unix_socket.h"
#include "kernel_ext/launcher/tree.h"

namespace overmind::launcher {
namespace {

constexpr double kStatusSeconds = 2;  // between the end of the process and the zygote's word about it

int open_process(pid_t pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

bool gone(int process) {
  pollfd entry{process, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

[[noreturn]] void end_as(int status) {
  if (!WIFSIGNALED(status)) ::_exit(WEXITSTATUS(status));
  const rlimit none{0, 0};  // the core that there is to see is the other process's
  ::setrlimit(RLIMIT_CORE, &none);
  ::signal(WTERMSIG(status), SIG_DFL);
  sigset_t set;
  ::sigfillset(&set);
  ::raise(WTERMSIG(status));
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
  ::_exit(128 + WTERMSIG(status));
}

// Whether the process has a handler for the signal or ignores it; false if that can't be read.
bool takes(pid_t pid, int number) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  std::uint64_t bits = 0;
  for (std::string word; file >> word;)
    if (word == "SigCgt:" || word == "SigIgn:") {
      std::uint64_t mask = 0;
      file >> std::hex >> mask;
      bits |= mask;
    }
  return ((bits >> (number - 1)) & 1) != 0;
}

class Mirror {
 public:
  Mirror(const Options& options, Started started) : started_(std::move(started)), kernel_(options.mode == "kernel") {
    sigset_t all;
    ::sigfillset(&all);
    signals_.reset(::signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK));
    // The server that started a kernel and says so: a kernel must not outlive it.
    const char* server = std::getenv("JPY_PARENT_PID");
    if (kernel_ && server != nullptr && std::atol(server) == ::getppid()) server_.reset(open_process(::getppid()));
  }

  [[noreturn]] void run() {
    for (;;) {
      pollfd entries[] = {{signals_.get(), POLLIN, 0},
                          {listening_ ? started_.connection.get() : -1, POLLIN, 0},
                          {started_.process.get(), POLLIN, 0},
                          {server_.valid() ? server_.get() : -1, POLLIN, 0}};
      if (::poll(entries, 4, -1) < 0) continue;
      if (entries[1].revents != 0) hear();
      if (entries[2].revents != 0) end();
      if (entries[3].revents != 0) ::_exit(1);  // closes `life`: the kernel is killed with its group
      if (entries[0].revents != 0) pass_on();
    }
  }

 private:
  // "exit CODE" from the process itself as it exits, "end STATUS" from the zygote that waited for it.
  void hear() {
    const std::string message = receive_message(started_.connection.get(), nullptr);
    if (message.empty()) listening_ = false;
    if (message.starts_with("exit ")) exit_code_ = std::atoi(message.c_str() + 5);
    if (message.starts_with("end ")) status_ = std::atoi(message.c_str() + 4);
    if (status_) end_as(*status_);
  }

  // The zygote's word comes within milliseconds. Where it died, the process's own word stands; where that is
  // missing too, the process was killed by a signal that nobody saw.
  [[noreturn]] void end() {
    const Deadline deadline = deadline_in(kStatusSeconds);
    while (listening_ && wait_for(started_.connection.get(), POLLIN, deadline).ok()) hear();
    if (exit_code_) ::_exit(*exit_code_ & 0xff);
    end_as(SIGKILL);
  }

  void pass_on() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      const int number = static_cast<int>(info.ssi_signo);
      if (number == SIGCHLD) continue;
      if ((number == SIGTSTP || number == SIGTTIN || number == SIGTTOU) && !takes(started_.pid, number)) {
        stop();
        continue;
      }
      if (info.ssi_code == SI_KERNEL) {
        deliver(number, kGroup);  // a terminal signals a whole group
      } else if (kernel_) {
        deliver(number, leads_group_ ? kGroup : kTree);
      } else {
        deliver(number, kProcess);
      }
    }
  }

  // Whom somebody means who signals the launcher.
  enum Reach { kProcess, kGroup, kTree };

  void deliver(int number, Reach reach) {
    if (gone(started_.process.get())) return;  // its id may be another process's by now
    if (reach == kGroup) {
      ::kill(-started_.pid, number);
      return;
    }
    if (reach == kTree)
      for (const pid_t pid : descendants_of(started_.pid)) ::kill(pid, number);
    ::syscall(SYS_pidfd_send_signal, started_.process.get(), number, nullptr, 0);
  }

  // A group without a parent in its session is not stopped by SIGTSTP, so both stop by SIGSTOP.
  void stop() {
    deliver(SIGSTOP, kGroup);
    ::raise(SIGSTOP);
    deliver(SIGCONT, kGroup);
  }

  Started started_;
  bool kernel_;
  // jupyter_client gives a kernel a group and signals that. VS Code gives it none: it signals every process that it
  // finds below the launcher, in whatever group, and there the kernel is not.
  const bool leads_group_ = ::getpgrp() == ::getpid();
  UniqueFd signals_, server_;
  bool listening_ = true;
  std::optional<int> exit_code_, status_;
};

}  // namespace

void mirror(const Options& options, Started started) { Mirror(options, std::move(started)).run(); }

}  // namespace overmind::launcher
