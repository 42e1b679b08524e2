// SPDX-License-Identifier: MIT
#include "core/daemon.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "core/keeper.h"
#include "core/log.h"
#include "core/server.h"
#include "core/spawn.h"

namespace overmind {
namespace {

constexpr double kLockSeconds = 5;  // for an earlier daemon that is just ending
constexpr double kReportSeconds = 10;

// ---- the process itself

void close_inherited(int first_kept, int last_kept) {
  if (first_kept > 3) ::close_range(3, static_cast<unsigned>(first_kept) - 1, 0);
  ::close_range(static_cast<unsigned>(std::max(last_kept, 2)) + 1, ~0U, 0);
}

// What the starter ignores is still ignored after exec. Here: deaf to the terminal and to notebooks,
// told to stop by SIGTERM (through a signalfd), children reaped by the kernel.
void set_signals() {
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) ::signal(number, SIG_DFL);
  }
  for (int number : {SIGINT, SIGHUP, SIGQUIT, SIGPIPE, SIGCHLD, SIGXFSZ}) ::signal(number, SIG_IGN);
  sigset_t stop;
  ::sigemptyset(&stop);
  ::sigaddset(&stop, SIGTERM);
  ::sigprocmask(SIG_SETMASK, &stop, nullptr);
}

void prepare_process(int first_kept, int last_kept) {
  close_inherited(first_kept, last_kept);
  set_signals();
  ::umask(077);
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  // A manifest is read into memory that is large and short-lived: give it back at once.
  ::mallopt(M_MMAP_THRESHOLD, 128 * 1024);
  ::mallopt(M_ARENA_MAX, 1);
}

void point_stdio_at_log() {
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  for (int fd : {0, 1, 2}) ::dup2(null.get(), fd);
  if (log_fd() >= 0) ::dup2(log_fd(), 2);
}

// ---- one instance

struct Instance {
  UniqueFd lock;
  UniqueFd listener;
};

bool somebody_serves(const Config& config) { return connect_to(config.socket_path(), deadline_in(0.5)).ok(); }

// Errors: kTimeout stands for a daemon that holds the lock and does not answer.
Result<bool> take_lock(int lock, const Config& config) {
  Deadline deadline = deadline_in(kLockSeconds);
  while (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return errno_status("flock " + config.lock_path());
    if (somebody_serves(config)) return false;
    if (std::chrono::steady_clock::now() >= deadline) {
      return Status(Code::kTimeout, "a daemon holds " + config.lock_path() + " but does not answer; end that process");
    }
    timespec ten_ms{0, 10'000'000};
    ::nanosleep(&ten_ms, nullptr);
  }
  return true;
}

// An instance without descriptors: another daemon serves already.
Result<Instance> acquire(const Config& config) {
  for (const std::string& folder : {config.runtime_dir, config.instance_dir()}) {
    if (Status made = ensure_private_dir(folder); !made.ok()) return made;
  }
  Instance instance;
  Result<UniqueFd> lock = open_lock_file(config.lock_path());
  if (!lock.ok()) return lock.status();
  Result<bool> taken = take_lock(lock.value().get(), config);
  if (!taken.ok()) return taken.status();
  if (!taken.value()) return instance;
  // The lock is ours, so whatever is here belongs to nobody any more.
  ::unlink(config.socket_path().c_str());
  Result<UniqueFd> listener = listen_at(config.socket_path());
  if (!listener.ok()) return listener.status();
  instance.lock = std::move(lock).value();
  instance.listener = std::move(listener).value();
  return instance;
}

// ---- telling the starter

class Reporter {
 public:
  explicit Reporter(int fd) : fd_(fd) {}
  void report(const StartReport& report) {
    std::string line = report.to_line();
    int fd = fd_.valid() ? fd_.get() : STDERR_FILENO;
    [[maybe_unused]] ssize_t written = ::write(fd, line.data(), line.size());
    fd_.reset();
  }
  bool has_pipe() const { return fd_.valid(); }
  void reset(int fd = -1) { fd_.reset(fd); }

 private:
  UniqueFd fd_;
};

DaemonExit exit_of(const StartReport& report) {
  switch (report.outcome) {
    case StartReport::Outcome::kOk:
      return DaemonExit::kOk;
    case StartReport::Outcome::kAlreadyRunning:
      return DaemonExit::kAlreadyRunning;
    case StartReport::Outcome::kFailed:
      break;
  }
  return DaemonExit::kFailed;
}

// Started by hand: the terminal gets the outcome that the pipe of a starter would get.
DaemonExit print_report(int fd) {
  std::string line;
  char part[512];
  while (line.find('\n') == std::string::npos && wait_for(fd, POLLIN, deadline_in(kReportSeconds)).ok()) {
    ssize_t got = ::read(fd, part, sizeof(part));
    if (got <= 0) break;
    line.append(part, static_cast<std::size_t>(got));
  }
  std::fputs(line.empty() ? "failed unavailable: overmindd ended while starting\n" : line.c_str(), stderr);
  return exit_of(StartReport::from_line(line));
}

// Splits in two. Nothing in the process that goes on; in the one that was started, its exit code.
Result<std::optional<DaemonExit>> detach(Reporter& reporter) {
  UniqueFd read_end;
  bool by_hand = !reporter.has_pipe();
  if (by_hand) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return errno_status("pipe");
    read_end.reset(ends[0]);
    reporter.reset(ends[1]);
  }
  pid_t child = ::fork();
  if (child < 0) return errno_status("fork");
  if (child > 0) {
    reporter.reset();
    return std::optional(by_hand ? print_report(read_end.get()) : DaemonExit::kOk);
  }
  ::setsid();
  if (::chdir("/") != 0) return errno_status("chdir /");
  point_stdio_at_log();
  return std::optional<DaemonExit>();
}

// ---- keeper and server

// Runs this very program as keeper of this very process. Gives this end of its socket.
UniqueFd start_keeper(const Config& config, const Instance& instance) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return {};
  UniqueFd ours(pair[0]), theirs(pair[1]);
  // Out of the way of the numbers that they get there.
  UniqueFd lock(::fcntl(instance.lock.get(), F_DUPFD_CLOEXEC, 10));
  UniqueFd listener(::fcntl(instance.listener.get(), F_DUPFD_CLOEXEC, 10));
  UniqueFd socket(::fcntl(theirs.get(), F_DUPFD_CLOEXEC, 10));
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, lock.get(), kAdoptedLock);
  ::posix_spawn_file_actions_adddup2(&files, listener.get(), kAdoptedListener);
  ::posix_spawn_file_actions_adddup2(&files, socket.get(), kAdoptedSocket);

  std::vector<std::string> arguments = daemon_arguments(config);
  arguments.insert(arguments.begin(), "overmindd");
  arguments.push_back("--adopt-server=" + std::to_string(::getpid()));
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  int error = ::posix_spawn(&pid, "/proc/self/exe", &files, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&files);
  if (error == 0) return ours;
  log_line(LogLevel::kError, errno_status("no keeper: spawn", error).to_string());
  return {};
}

// What the server process does, from the first one or from one that follows a crash.
int run_server(const Config& config, const Instance& instance, Reporter& reporter, UniqueFd keeper, KeptEntries kept) {
  Result<std::uint64_t> budget = parse_budget(config.budget, available_memory());
  ServerSetup setup;
  setup.config = config;
  setup.budget = budget.ok() ? budget.value() : 0;
  setup.listener = instance.listener.get();
  setup.keeper = std::move(keeper);
  setup.kept = std::move(kept);
  setup.start_keeper = [&] { return start_keeper(config, instance); };
  setup.ready = [&](const Status&) {
    if (reporter.has_pipe()) reporter.report({StartReport::Outcome::kOk, {}});
  };
  Status served = serve(std::move(setup));
  if (served.ok()) return 0;
  log_line(LogLevel::kError, "server: " + served.to_string());
  if (reporter.has_pipe()) reporter.report({StartReport::Outcome::kFailed, served});
  return 1;
}

DaemonExit run_keeper(const Config& config, const Instance& instance, Reporter& reporter, int adopt_server) {
  StartServer serve_in_child = [&](UniqueFd socket, KeptEntries kept) {
    return run_server(config, instance, reporter, std::move(socket), std::move(kept));
  };
  StartedServer server{UniqueFd(adopt_server > 0 ? kAdoptedSocket : -1), adopt_server};
  if (adopt_server == 0) {
    std::optional<StartedServer> started = start_server(serve_in_child, {});
    if (!started) return DaemonExit::kFailed;
    server = std::move(*started);
  }
  reporter.reset();  // the server has its own copy
  KeeperEnd end = keep(std::move(server), serve_in_child);
  return end == KeeperEnd::kStopped ? DaemonExit::kOk : DaemonExit::kFailed;
}

}  // namespace

DaemonExit run_daemon(DaemonOptions options) {
  Config& config = options.config;
  bool adopting = options.adopt_server > 0;
  prepare_process(adopting ? kAdoptedLock : options.ready_fd, adopting ? kAdoptedSocket : options.ready_fd);
  Reporter reporter(options.ready_fd);
  auto fail = [&](const Status& status) {
    StartReport report{StartReport::Outcome::kFailed, status};
    reporter.report(report);
    return exit_of(report);
  };

  Instance instance;
  if (adopting) {
    instance = {UniqueFd(kAdoptedLock), UniqueFd(kAdoptedListener)};
  } else {
    // A share of the memory that is free now: a server that follows a crash must not take it of what is left.
    Result<std::uint64_t> budget = parse_budget(config.budget, available_memory());
    if (!budget.ok()) return fail(budget.status());
    config.budget = std::to_string(budget.value());
    Result<Instance> acquired = acquire(config);
    if (!acquired.ok()) return fail(acquired.status());
    instance = std::move(acquired).value();
    if (!instance.lock.valid()) {
      reporter.report({StartReport::Outcome::kAlreadyRunning, {}});
      return DaemonExit::kAlreadyRunning;
    }
  }
  Status logging = open_log(config.log_path(), log_level_from(config.log_level));
  if (!logging.ok() && !adopting) return fail(logging);
  if (adopting) {
    point_stdio_at_log();
  } else {
    Result<std::optional<DaemonExit>> detached = detach(reporter);
    if (!detached.ok()) return fail(detached.status());
    if (detached.value()) return *detached.value();
  }
  DaemonExit exit = run_keeper(config, instance, reporter, options.adopt_server);
  // Left to the kernel: whoever waits for the lock waits for the end of this process.
  instance.lock.release();
  return exit;
}

}  // namespace overmind
