// SPDX-License-Identifier: MIT
#include "kernel_ext/launcher/request.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/unix_socket.h"
#include "kernel_ext/launcher/size_signal.h"

namespace overmind::launcher {
namespace {

constexpr double kAnswerSeconds = 2;
constexpr std::size_t kMostDescriptors = 240;  // SCM_RIGHTS takes 253

using Strings = std::vector<std::string>;

std::string mask_of(const sigset_t& set) {
  std::uint64_t bits = 0;
  for (int number = 1; number <= 64; ++number)
    if (::sigismember(&set, number) == 1) bits |= std::uint64_t{1} << (number - 1);
  return std::to_string(bits);
}

// All that were open when this process was started: exec closes the others, and we open ours after this.
std::vector<int> open_descriptors() {
  std::vector<int> found;
  DIR* folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return found;
  while (const dirent* entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && fd != ::dirfd(folder) && (::fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0)
      found.push_back(fd);
  }
  ::closedir(folder);
  return found;
}

void put(std::string& out, const Strings& list) {
  auto number = [&](std::size_t value) {
    const auto fixed = static_cast<std::uint32_t>(value);
    out.append(reinterpret_cast<const char*>(&fixed), sizeof(fixed));
  };
  number(list.size());
  for (const std::string& text : list) {
    number(text.size());
    out += text;
  }
}

std::string payload_of(const Options& options, const Place& place, const Inherited& inherited,
                       const std::vector<int>& descriptors) {
  const mode_t mask = ::umask(0);
  ::umask(mask);
  Strings environment, numbers;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  for (const int fd : descriptors) numbers.push_back(std::to_string(fd));
  std::string out;
  put(out, {place.key, options.mode, options.target, std::to_string(mask), mask_of(inherited.blocked),
            mask_of(inherited.ignored)});
  put(out, options.argv);
  put(out, environment);
  put(out, numbers);
  return out;
}

Result<UniqueFd> memory_file(const std::string& bytes) {
  const NoSizeSignal unlimited;
  UniqueFd fd(::memfd_create("overmind-request", MFD_CLOEXEC));
  if (!fd.valid()) return errno_status("memfd_create");
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t wrote = ::write(fd.get(), bytes.data() + at, bytes.size() - at);
    if (wrote < 0 && errno != EINTR) return errno_status("writing a request");
    if (wrote > 0) at += static_cast<std::size_t>(wrote);
  }
  return fd;
}

Status send_request(int connection, const std::vector<int>& descriptors) {
  char word[] = "start";
  iovec part{word, sizeof(word) - 1};
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  if (::sendmsg(connection, &message, MSG_NOSIGNAL) < 0) return errno_status("sending a request");
  return {};
}

Result<Started> await_start(UniqueFd connection, UniqueFd life) {
  if (!wait_for(connection.get(), POLLIN, deadline_in(kAnswerSeconds)).ok()) {
    // From now on nothing more can arrive: what has arrived until now is what the other side knows it has sent.
    ::shutdown(connection.get(), SHUT_RDWR);
  }
  UniqueFd process;
  const std::string answer = receive_message(connection.get(), &process);
  pid_t pid = -1;
  if (answer.starts_with("run ")) std::from_chars(answer.data() + 4, answer.data() + answer.size(), pid);
  if (pid > 0 && process.valid()) return Started{std::move(connection), std::move(life), std::move(process), pid};
  if (answer.starts_with("no ")) return Status(Code::kUnavailable, answer.substr(3));
  return Status(Code::kTimeout, "its zygote gave no start");
}

}  // namespace

Inherited Inherited::now() {
  Inherited inherited{};
  ::sigprocmask(SIG_BLOCK, nullptr, &inherited.blocked);
  ::sigemptyset(&inherited.ignored);
  for (int number = 1; number <= 64; ++number) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN)
      ::sigaddset(&inherited.ignored, number);
  }
  return inherited;
}

std::string receive_message(int connection, UniqueFd* attached) {
  static FrameBuffer buffer;
  Result<Frame> frame = receive_frame(connection, buffer);
  if (!frame.ok()) return {};
  if (attached != nullptr) *attached = std::move(frame.value().fd);
  const auto bytes = frame.value().bytes;
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Result<Started> ask(const Options& options, const Place& place, const Inherited& inherited) {
  const std::vector<int> passed = open_descriptors();
  if (passed.size() > kMostDescriptors) return Status(Code::kExhausted, "more descriptors than one message takes");
  Result<UniqueFd> connection = connect_to_own(place.zygote, deadline_in(kAnswerSeconds));
  if (connection.status().code() == Code::kUnavailable)
    return Status(Code::kUnavailable, "no zygote of this environment is ready yet");
  if (!connection.ok()) return connection.status();
  // Descriptors go only to a zygote that is awake: one that hangs would hold them open.
  if (!wait_for(connection.value().get(), POLLIN, deadline_in(kAnswerSeconds)).ok()) {
    return Status(Code::kTimeout, "its zygote did not answer in time");
  }
  if (const std::string word = receive_message(connection.value().get(), nullptr); word != "ready") {
    return Status(Code::kUnavailable, word.starts_with("no ") ? word.substr(3) : "its zygote is gone");
  }
  const UniqueFd folder(::open(".", O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!folder.valid()) return errno_status("opening the working folder");
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return errno_status("pipe");
  UniqueFd life_end(ends[0]), life(ends[1]);
  Result<UniqueFd> payload = memory_file(payload_of(options, place, inherited, passed));
  if (!payload.ok()) return payload.status();
  std::vector<int> descriptors{payload.value().get(), folder.get(), life_end.get()};
  descriptors.insert(descriptors.end(), passed.begin(), passed.end());
  if (Status sent = send_request(connection.value().get(), descriptors); !sent.ok()) return sent;
  return await_start(std::move(connection).value(), std::move(life));
}

}  // namespace overmind::launcher
