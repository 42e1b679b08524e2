// SPDX-License-Identifier: MIT
#include "core/log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <ctime>

#include "core/unique_fd.h"

namespace overmind {
namespace {

constexpr off_t kMaxLog = 1 << 20;
constexpr std::array<std::string_view, 4> kNames = {"debug", "info", "warning", "error"};

int fd_ = -1;
LogLevel level_ = LogLevel::kWarning;

}  // namespace

LogLevel log_level_from(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<LogLevel>(i);
  }
  return LogLevel::kWarning;
}

Status open_log(const std::string& path, LogLevel level) {
  constexpr int kFlags = O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  UniqueFd fd(::open(path.c_str(), kFlags, 0600));
  if (!fd.valid() && errno == ELOOP) return {Code::kDenied, "log " + path + " is a symlink; remove it"};
  if (!fd.valid()) return errno_status("open " + path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_status("stat " + path);
  if (info.st_uid != ::geteuid() || !S_ISREG(info.st_mode)) {
    return {Code::kDenied, "log " + path + " is not a file of this user; remove it"};
  }
  if (info.st_size > kMaxLog && ::rename(path.c_str(), (path + ".old").c_str()) == 0) {
    fd.reset(::open(path.c_str(), kFlags, 0600));
    if (!fd.valid()) return errno_status("open " + path);
  }
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd.release();
  level_ = level;
  return {};
}

int log_fd() { return fd_; }

void log_line(LogLevel level, std::string_view message) {
  if (fd_ < 0 || level < level_) return;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm utc{};
  ::gmtime_r(&now.tv_sec, &utc);
  char stamp[32], head[96];
  std::strftime(stamp, sizeof(stamp), "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(head, sizeof(head), "%s.%03ldZ %s %d ", stamp, now.tv_nsec / 1000000,
                kNames[static_cast<std::size_t>(level)].data(), static_cast<int>(::getpid()));
  std::string line = head;
  for (char c : message) line += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  line += '\n';
  // A full disk must not stop the store: nothing to do about a line that can't be written.
  [[maybe_unused]] ssize_t written = ::write(fd_, line.data(), line.size());
}

}  // namespace overmind
