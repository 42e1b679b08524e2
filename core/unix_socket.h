// SPDX-License-Identifier: MIT
// Local sockets that keep message boundaries (AF_UNIX, SOCK_SEQPACKET): a frame arrives whole or
// not at all, so there is no partial state to keep per connection. At most one descriptor travels
// with a message.
//
// All sockets here are close-on-exec. Sends and receives never block; wait_for() is the only wait.
// Thread safety: functions are re-entrant; one socket belongs to one thread at a time.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "core/protocol.h"
#include "core/status.h"
#include "core/unique_fd.h"

namespace overmind {

using Deadline = std::chrono::steady_clock::time_point;
inline Deadline deadline_in(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

using FrameBuffer = std::array<std::byte, kMaxFrame>;

struct Frame {
  std::span<const std::byte> bytes;  // inside the FrameBuffer it was received into; empty: the peer is gone
  UniqueFd fd;
};

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
};

// Binds and listens; `path` must not exist. Errors: kInvalid (path longer than a socket address), kIo.
Result<UniqueFd> listen_at(const std::string& path);

// Errors: kUnavailable (nobody listens there), kTimeout, kInvalid (path too long), kDenied, kIo.
Result<UniqueFd> connect_to(const std::string& path, Deadline deadline);

// The same, but only a listener of this process's own user. Errors also: kDenied (another user serves there).
Result<UniqueFd> connect_to_own(const std::string& path, Deadline deadline);

// The next connection, non-blocking; nothing when none is waiting. Errors: kExhausted (descriptors), kIo.
Result<std::optional<UniqueFd>> accept_from(int listener);

// Who is at the other end; for a client, who called listen().
Result<Peer> peer_of(int fd);

// Errors: kTimeout ("would block": nothing was sent), kUnavailable (the peer is gone), kExhausted, kIo.
Status send_frame(int fd, std::span<const std::byte> bytes, int attached = -1);

// Descriptors beyond the first are closed. Errors: kTimeout (nothing there), kInvalid (frame longer
// than the buffer), kUnavailable (reset), kIo.
Result<Frame> receive_frame(int fd, FrameBuffer& buffer);

// Until `fd` is ready for `events` (POLLIN, POLLOUT) or hung up. Errors: kTimeout, kIo.
Status wait_for(int fd, short events, Deadline deadline);

// send_frame() and receive_frame() that wait for their turn. An ended connection is kUnavailable.
Status send_by(int fd, std::span<const std::byte> bytes, int attached, Deadline deadline);
Result<Frame> receive_by(int fd, FrameBuffer& buffer, Deadline deadline);

}  // namespace overmind
