// SPDX-License-Identifier: MIT
#include "core/unix_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace overmind {
namespace {

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Status(Code::kInvalid, "socket path " + path + " has " + std::to_string(path.size()) +
                                      " bytes, a socket address holds 107; set OVERMIND_RUNTIME_DIR to a shorter one");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

timeval time_left(Deadline deadline) {
  auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - std::chrono::steady_clock::now());
  std::int64_t micros = std::max<std::int64_t>(left.count(), 1);  // 0 would mean no limit
  return {.tv_sec = micros / 1000000, .tv_usec = micros % 1000000};
}

Status connect_status(const std::string& path, int error) {
  std::string context = "connect to " + path;
  if (error == ENOENT || error == ECONNREFUSED) return {Code::kUnavailable, "no daemon listens at " + path};
  if (error == EAGAIN || error == EINPROGRESS) return {Code::kTimeout, context + ": the daemon accepts no connection"};
  return errno_status(context, error);
}

}  // namespace

Result<UniqueFd> listen_at(const std::string& path) {
  Result<sockaddr_un> address = address_of(path);
  if (!address.ok()) return address.status();
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return errno_status("socket");
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.value()), sizeof(sockaddr_un)) != 0) {
    return errno_status("bind " + path);
  }
  if (::listen(fd.get(), 128) != 0) return errno_status("listen at " + path);
  return fd;
}

Result<UniqueFd> connect_to(const std::string& path, Deadline deadline) {
  Result<sockaddr_un> address = address_of(path);
  if (!address.ok()) return address.status();
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno_status("socket");
  // A full backlog makes connect() wait, for as long as the send timeout says.
  timeval left = time_left(deadline);
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &left, sizeof(left));
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.value()), sizeof(sockaddr_un)) != 0) {
    if (errno != EINTR || std::chrono::steady_clock::now() >= deadline) return connect_status(path, errno);
  }
  if (::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) return errno_status("fcntl on a socket");
  return fd;
}

Result<UniqueFd> connect_to_own(const std::string& path, Deadline deadline) {
  Result<UniqueFd> fd = connect_to(path, deadline);
  if (!fd.ok()) return fd;
  Result<Peer> peer = peer_of(fd.value().get());
  if (!peer.ok()) return peer.status();
  if (peer.value().uid != ::geteuid()) {
    return Status(Code::kDenied, path + " is served by user " + std::to_string(peer.value().uid));
  }
  return fd;
}

Result<std::optional<UniqueFd>> accept_from(int listener) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.valid()) return std::optional<UniqueFd>(std::move(fd));
  // A connection that ended while it waited in the queue is none of our failures.
  if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return std::optional<UniqueFd>();
  return errno_status("accept");
}

Result<Peer> peer_of(int fd) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return errno_status("SO_PEERCRED");
  return Peer{credentials.pid, credentials.uid};
}

Status send_frame(int fd, std::span<const std::byte> bytes, int attached) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (attached >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &attached, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return {};
  if (errno == EAGAIN) return {Code::kTimeout, "send: would block"};
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return {Code::kUnavailable, "the peer is gone"};
  return errno_status("send");
}

Result<Frame> receive_frame(int fd, FrameBuffer& buffer) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t size;
  do {
    size = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (size < 0 && errno == EINTR);
  if (size < 0) {
    if (errno == EAGAIN) return Status(Code::kTimeout, "receive: nothing there");
    if (errno == ECONNRESET || errno == ENOTCONN) return Status(Code::kUnavailable, "the peer is gone");
    return errno_status("receive");
  }
  Frame frame;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
      int received;
      std::memcpy(&received, reinterpret_cast<char*>(header) + at, sizeof(int));
      UniqueFd owned(received);  // padding leaves room for a second one: it closes here
      if (!frame.fd.valid()) frame.fd = std::move(owned);
    }
  }
  if ((message.msg_flags & MSG_TRUNC) != 0) return Status(Code::kInvalid, "message longer than 64 KiB");
  frame.bytes = {buffer.data(), static_cast<std::size_t>(size)};
  return frame;
}

Status wait_for(int fd, short events, Deadline deadline) {
  for (;;) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd entry{fd, events, 0};
    int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30)));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return errno_status("poll");
    if (left <= 0) return {Code::kTimeout, "no answer in time"};
  }
}

Status send_by(int fd, std::span<const std::byte> bytes, int attached, Deadline deadline) {
  for (;;) {
    Status sent = send_frame(fd, bytes, attached);
    if (sent.code() != Code::kTimeout) return sent;
    if (Status ready = wait_for(fd, POLLOUT, deadline); !ready.ok()) return ready;
  }
}

Result<Frame> receive_by(int fd, FrameBuffer& buffer, Deadline deadline) {
  for (;;) {
    if (Status ready = wait_for(fd, POLLIN, deadline); !ready.ok()) return ready;
    Result<Frame> frame = receive_frame(fd, buffer);
    if (frame.ok() && frame.value().bytes.empty())
      return Status(Code::kUnavailable, "the daemon closed the connection");
    if (frame.ok() || frame.status().code() != Code::kTimeout) return frame;
  }
}

}  // namespace overmind
