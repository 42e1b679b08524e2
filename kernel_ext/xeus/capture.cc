// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/capture.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "kernel_ext/xeus/signals_blocked.h"

namespace overmind::kernel {
namespace {

constexpr std::size_t kReadSize = 64 * 1024;
constexpr std::size_t kSafeWrite = 4096;  // PIPE_BUF: a pipe that is writable takes so much without waiting

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Stops rather than waits: nobody may read the terminal or pipe that the kernel was started on.
void echo(int fd, std::string_view bytes) {
  while (fd >= 0 && !bytes.empty()) {
    pollfd state = {fd, POLLOUT, 0};
    if (poll(&state, 1, 0) != 1 || (state.revents & POLLOUT) == 0) return;
    const ssize_t written = write(fd, bytes.data(), std::min(bytes.size(), kSafeWrite));
    if (written <= 0) return;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace

Capture::Capture(Output& output) : output_(output), stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!stop_.valid()) fail("eventfd");
  redirect(STDOUT_FILENO);
  redirect(STDERR_FILENO);
  const SignalsBlocked blocked;
  thread_ = std::thread(&Capture::run, this);
}

Capture::~Capture() {
  for (std::size_t i = 0; i < pipes_.size(); ++i)
    if (pipes_[i].original.valid()) dup2(pipes_[i].original.get(), static_cast<int>(i) + 1);
  drain();
  const std::uint64_t one = 1;
  if (write(stop_.get(), &one, sizeof one) != sizeof one) return;
  thread_.join();
}

void Capture::redirect(int fd) {
  Pipe& pipe = pipes_[static_cast<std::size_t>(fd - 1)];
  pipe.original = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!pipe.original.valid()) return;  // it is closed, and stays so
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe2");
  pipe.reader = UniqueFd(ends[0]);
  const UniqueFd writer(ends[1]);
  if (dup2(writer.get(), fd) < 0) fail("dup2");  // without O_CLOEXEC: programs that the user starts write there, too
}

void Capture::drain() {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [this] { return !reading_; });
  std::array<std::uint64_t, 2> target;
  for (std::size_t i = 0; i < pipes_.size(); ++i) {
    int waiting = 0;
    if (pipes_[i].reader.valid()) ioctl(pipes_[i].reader.get(), FIONREAD, &waiting);
    target[i] = pipes_[i].delivered + static_cast<std::uint64_t>(waiting);
  }
  progress_.wait(lock, [&] { return pipes_[0].delivered >= target[0] && pipes_[1].delivered >= target[1]; });
}

void Capture::run() {
  std::array<pollfd, 3> fds = {
      {{pipes_[0].reader.get(), POLLIN, 0}, {pipes_[1].reader.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}}};
  while (true) {
    if (poll(fds.data(), fds.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return;
    }
    if (fds[2].revents != 0) return;
    for (const Stream stream : {Stream::kStdout, Stream::kStderr}) {
      pollfd& fd = fds[static_cast<std::size_t>(stream)];
      // The last writer is gone: nothing can come any more.
      if (fd.revents != 0 && !read_some(stream)) fd.fd = -1;
    }
  }
}

bool Capture::read_some(Stream stream) {
  static thread_local std::vector<char> bytes(kReadSize);
  Pipe& pipe = pipes_[static_cast<std::size_t>(stream)];
  {
    const std::lock_guard lock(mutex_);
    reading_ = true;
  }
  const ssize_t size = read(pipe.reader.get(), bytes.data(), bytes.size());
  if (size > 0) {
    const std::string_view got(bytes.data(), static_cast<std::size_t>(size));
    pipe.partial += got;
    output_.write(stream, take_utf8(pipe.partial), output_.parent());
    echo(pipe.original.get(), got);
  }
  {
    const std::lock_guard lock(mutex_);
    reading_ = false;
    if (size > 0) pipe.delivered += static_cast<std::uint64_t>(size);
  }
  progress_.notify_all();
  return size > 0 || (size < 0 && errno == EINTR);
}

}  // namespace overmind::kernel
