// SPDX-License-Identifier: MIT
#include "kernel_ext/launcher/plain.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <vector>

#include "core/spawn.h"
#include "kernel_ext/launcher/size_signal.h"

namespace overmind::launcher {
namespace {

void exec_python(const Options& options, const std::vector<std::string>& arguments) {
  std::vector<std::string> words{options.python};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv(options.python.c_str(), argv.data());
}

// Nothing of the user's program is held: no stream, no signal setting, not its session or folder.
void detach(int keep) {
  ::setsid();
  if (::chdir("/") != 0) ::_exit(1);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd = 0; fd < 3; ++fd) ::dup2(null, fd);
  if (keep > 3) ::close_range(3, static_cast<unsigned>(keep) - 1, 0);
  ::close_range(static_cast<unsigned>(keep) + 1, ~0U, 0);
  for (int number = 1; number <= 64; ++number) ::signal(number, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void become_zygote(const Options& options, const Place& place, int ready) {
  detach(ready);
  const std::string stops = place.zygote.substr(0, place.zygote.rfind('/')) + "/stopped";
  const std::string last_stop = stamp_of(stops);
  pollfd entry{ready, POLLIN, 0};
  while (::poll(&entry, 1, -1) < 0 && errno == EINTR) continue;
  ::close(ready);
  // Whoever says `overmind stop` while a program runs wants no zygote for having run it.
  if (stamp_of(stops) != last_stop) ::_exit(0);
  // Kernels are worth a zygote that has only the engine; a script that imports nothing is not.
  if (options.mode != "kernel" && ::access(place.profile.c_str(), R_OK) != 0) ::_exit(0);
  Result<UniqueFd> lock = open_lock_file(place.zygote + ".lock");
  // A zygote holds its lock for life. One that is just retiring lets go of it within a moment.
  for (int tries = 0; lock.ok() && ::flock(lock.value().get(), LOCK_EX | LOCK_NB) != 0; ++tries) {
    if (tries == 100) ::_exit(0);
    const timespec ten_ms{0, 10'000'000};
    ::nanosleep(&ten_ms, nullptr);
  }
  if (!lock.ok()) ::_exit(1);
  // Whom `overmind stop` has to end; nothing but the lock itself says that it is held.
  const std::string holder = std::to_string(::getpid());
  if (::ftruncate(lock.value().get(), 0) != 0 || ::pwrite(lock.value().get(), holder.data(), holder.size(), 0) < 0)
    ::_exit(1);
  const std::string key_path = place.zygote + ".key";
  UniqueFd file(::open(key_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.valid() ||
      ::write(file.get(), place.key.data(), place.key.size()) != static_cast<ssize_t>(place.key.size()))
    ::_exit(1);
  file.reset();
  const int held = lock.value().release();
  ::fcntl(held, F_SETFD, 0);
  exec_python(options, {options.boot, "zygote", place.zygote, place.profile, std::to_string(held), options.mode,
                        options.target});
  ::_exit(1);
}

// The pipe's end that the interpreter closes when it is ready; -1 if no zygote can be left behind.
int leave_behind(const Options& options, const Place& place) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  UniqueFd ready(ends[0]), held(ends[1]);
  const pid_t first = ::fork();
  if (first < 0) return -1;
  if (first == 0) {
    held.reset();
    if (::fork() == 0) become_zygote(options, place, ready.get());
    ::_exit(0);
  }
  while (::waitpid(first, nullptr, 0) < 0 && errno == EINTR) continue;
  return held.release();
}

}  // namespace

Status run_plain(const Options& options, const Place* place, const std::string& log_path) {
  int ready = -1;
  if (place != nullptr) ready = leave_behind(options, *place);
  std::vector<std::string> arguments{
      options.boot,         "plain", options.mode, options.target, place != nullptr ? place->profile : "",
      std::to_string(ready)};
  arguments.insert(arguments.end(), options.argv.begin(), options.argv.end());
  exec_python(options, arguments);
  Status failed = errno_status("running " + options.python);
  log_line(log_path, failed.message());
  return failed;
}

Status run_bare(const Options& options) {
  std::vector<std::string> arguments{options.target};
  arguments.insert(arguments.end(), options.argv.begin(), options.argv.end());
  exec_python(options, arguments);
  return errno_status("running " + options.python);
}

void log_line(const std::string& log_path, const std::string& message) {
  const NoSizeSignal unlimited;
  const UniqueFd fd(::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd.valid()) return;
  char when[32];
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%SZ", &parts);
  std::string line = std::string(when) + " launcher " + std::to_string(::getpid()) + " " + message;
  for (char& c : line)
    if (static_cast<unsigned char>(c) < 0x20) c = '?';
  line += '\n';
  [[maybe_unused]] const ssize_t wrote = ::write(fd.get(), line.data(), line.size());
}

}  // namespace overmind::launcher
