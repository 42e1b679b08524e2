// SPDX-License-Identifier: MIT
#include "core/spawn.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>

namespace overmind {
namespace {

constexpr double kConnectSeconds = 2;
constexpr double kStartSeconds = 10;
constexpr int kReadyFd = 3;

void nap() {
  timespec five_ms{0, 5'000'000};
  ::nanosleep(&five_ms, nullptr);
}

// flock() has no deadline of its own, so ask again until then. Errors: kTimeout, kIo.
Status lock_by(int fd, int operation, Deadline deadline) {
  while (::flock(fd, operation | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return errno_status("flock");
    if (std::chrono::steady_clock::now() >= deadline) return {Code::kTimeout, "lock is held by another process"};
    nap();
  }
  return {};
}

// Refuses a folder that others can write: whoever owns it could answer in the daemon's place.
Status check_folders(const Config& config, bool create) {
  struct stat info {};
  if (!create && ::lstat(config.instance_dir().c_str(), &info) != 0 && errno == ENOENT) {
    return {Code::kUnavailable, "no daemon runs in " + config.runtime_dir};
  }
  if (Status outer = ensure_private_dir(config.runtime_dir); !outer.ok()) return outer;
  return ensure_private_dir(config.instance_dir());
}

// Reads the one line. The end of the pipe without one means that the daemon died.
StartReport await_report(int fd, Deadline deadline) {
  std::string line;
  for (;;) {
    Status ready = wait_for(fd, POLLIN, deadline);
    if (!ready.ok()) return {StartReport::Outcome::kFailed, {Code::kTimeout, "overmindd did not start in time"}};
    char part[512];
    ssize_t got = ::read(fd, part, sizeof(part));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return {StartReport::Outcome::kFailed, {Code::kUnavailable, "overmindd ended while starting"}};
    line.append(part, static_cast<std::size_t>(got));
    if (line.find('\n') != std::string::npos || line.size() > 8192) return StartReport::from_line(line);
  }
}

struct SpawnSettings {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&files);
    ::posix_spawnattr_init(&attributes);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&files);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;
};

// Nothing of this process goes over: no descriptor, no signal setting, not its session.
void isolate(SpawnSettings& settings, int ready) {
  for (int fd = 0; fd < kReadyFd; ++fd) {
    ::posix_spawn_file_actions_addopen(&settings.files, fd, "/dev/null", O_RDWR, 0);
  }
  ::posix_spawn_file_actions_adddup2(&settings.files, ready, kReadyFd);
  ::posix_spawn_file_actions_addclosefrom_np(&settings.files, kReadyFd + 1);
  sigset_t all, none;
  ::sigfillset(&all);
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigdefault(&settings.attributes, &all);
  ::posix_spawnattr_setsigmask(&settings.attributes, &none);
  ::posix_spawnattr_setflags(&settings.attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
}

Result<pid_t> spawn(const Config& config, int ready) {
  std::vector<std::string> arguments = daemon_arguments(config);
  arguments.push_back("--ready-fd=" + std::to_string(kReadyFd));
  arguments.insert(arguments.begin(), config.daemon_path);
  // The dynamic loader of a conda environment may need its path; nothing else of the environment matters.
  const char* libraries = std::getenv("LD_LIBRARY_PATH");
  std::string library_path = std::string("LD_LIBRARY_PATH=") + (libraries != nullptr ? libraries : "");
  std::vector<char*> argv, environment;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  if (libraries != nullptr) environment.push_back(library_path.data());
  environment.push_back(nullptr);

  SpawnSettings settings;
  isolate(settings, ready);
  pid_t pid = -1;
  int error = ::posix_spawn(&pid, config.daemon_path.c_str(), &settings.files, &settings.attributes, argv.data(),
                            environment.data());
  if (error != 0) {
    Status failed = errno_status("start " + config.daemon_path, error);
    return Status(Code::kUnavailable, failed.message());
  }
  return pid;
}

Status start_daemon(const Config& config) {
  if (config.daemon_path.empty()) return {Code::kUnavailable, "no daemon runs, and where overmindd is was not said"};
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return errno_status("pipe");
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  // dup2 onto itself would keep it close-on-exec in older C libraries.
  if (write_end.get() <= kReadyFd) write_end.reset(::fcntl(write_end.get(), F_DUPFD_CLOEXEC, kReadyFd + 1));
  if (!write_end.valid()) return errno_status("dup");
  Result<pid_t> pid = spawn(config, write_end.get());
  if (!pid.ok()) return pid.status();
  write_end.reset();
  StartReport report = await_report(read_end.get(), deadline_in(kStartSeconds));
  // It forks the daemon and exits, so this takes no time unless it hangs.
  if (report.failure.code() == Code::kTimeout) ::kill(pid.value(), SIGKILL);
  while (::waitpid(pid.value(), nullptr, 0) < 0 && errno == EINTR) continue;
  if (report.outcome == StartReport::Outcome::kFailed) {
    return {report.failure.code(), report.failure.message() + "; its log is " + config.log_path()};
  }
  return {};
}

Result<UniqueFd> start_and_connect(const Config& config) {
  Result<UniqueFd> lock = open_lock_file(config.start_lock_path());
  if (!lock.ok()) return lock;
  Status locked = lock_by(lock.value().get(), LOCK_EX, deadline_in(kStartSeconds + kConnectSeconds));
  if (!locked.ok()) return Status(locked.code(), config.start_lock_path() + ": " + locked.message());
  Result<UniqueFd> fd =
      connect_to_own(config.socket_path(), deadline_in(kConnectSeconds));  // another starter may have been first
  if (!fd.ok() && fd.status().code() == Code::kUnavailable) {
    Status started = start_daemon(config);
    fd = started.ok() ? connect_to_own(config.socket_path(), deadline_in(kConnectSeconds)) : Result<UniqueFd>(started);
  }
  // A fork of this process may hold the open file, so closing it would not be enough.
  ::flock(lock.value().get(), LOCK_UN);
  return fd;
}

}  // namespace

Result<UniqueFd> connect_daemon(const Config& config, bool start) {
  if (Status folders = check_folders(config, start); !folders.ok()) return folders;
  Result<UniqueFd> fd = connect_to_own(config.socket_path(), deadline_in(kConnectSeconds));
  if (fd.ok() || !start || fd.status().code() != Code::kUnavailable) return fd;
  return start_and_connect(config);
}

Status wait_until_gone(const Config& config, Deadline deadline) {
  Result<UniqueFd> lock = open_lock_file(config.lock_path());
  if (!lock.ok()) return lock.status();
  Status locked = lock_by(lock.value().get(), LOCK_SH, deadline);
  if (locked.code() == Code::kTimeout) return {Code::kTimeout, "the daemon did not end in time"};
  return locked;
}

std::string StartReport::to_line() const {
  if (outcome == Outcome::kOk) return "ok\n";
  if (outcome == Outcome::kAlreadyRunning) return "already-running\n";
  std::string line = "failed " + std::string(code_name(failure.code())) + ": " + failure.message();
  for (char& c : line) c = c == '\n' ? ' ' : c;
  return line + "\n";
}

StartReport StartReport::from_line(const std::string& line) {
  std::string text = line.substr(0, line.find('\n'));
  if (text == "ok") return {Outcome::kOk, {}};
  if (text == "already-running") return {Outcome::kAlreadyRunning, {}};
  std::size_t colon = text.find(": ");
  if (!text.starts_with("failed ") || colon == std::string::npos) {
    return {Outcome::kFailed, {Code::kUnavailable, "overmindd said '" + text + "'"}};
  }
  return {Outcome::kFailed, protocol::status_of({text.substr(7, colon - 7), text.substr(colon + 2)})};
}

std::vector<std::string> daemon_arguments(const Config& config) {
  return {"--runtime-dir=" + config.runtime_dir, "--budget=" + config.budget, "--log-level=" + config.log_level,
          "--idle-exit=" + std::to_string(config.idle_exit_seconds)};
}

Result<UniqueFd> open_lock_file(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600));
  if (!fd.valid() && errno == ELOOP) return Status(Code::kDenied, "lock " + path + " is a symlink; remove it");
  if (!fd.valid()) return errno_status("open " + path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_status("stat " + path);
  if (info.st_uid != ::geteuid() || !S_ISREG(info.st_mode)) {
    return Status(Code::kDenied, "lock " + path + " is not a file of this user; remove it");
  }
  return fd;
}

}  // namespace overmind
