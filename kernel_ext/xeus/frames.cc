// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/frames.h"

#include <cerrno>
#include <utility>

namespace overmind::kernel {
namespace {

constexpr std::string_view kDelimiter = "<IDS|MSG>";
constexpr std::size_t kZeroCopy = 64 * 1024;  // below that a copy is cheaper than a second allocation

void add(zmq::multipart_t& frames, std::string&& bytes) {
  if (bytes.size() < kZeroCopy) {
    frames.addmem(bytes.data(), bytes.size());
    return;
  }
  auto* owned = new std::string(std::move(bytes));
  frames.add(zmq::message_t(
      owned->data(), owned->size(), [](void*, void* hint) { delete static_cast<std::string*>(hint); }, owned));
}

// Signals don't come so densely; but in a forked child ZeroMQ calls every call interrupted.
constexpr int kTries = 1000;

template <typename Call>
auto uninterrupted(const Call& call) {
  for (int tries = 1;; ++tries) {
    try {
      return call();
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR || tries == kTries) throw;
    }
  }
}

std::string text_of(const zmq::message_t& frame) { return {static_cast<const char*>(frame.data()), frame.size()}; }

}  // namespace

zmq::multipart_t to_frames(Message message, const Signer& signer) {
  zmq::multipart_t frames;
  for (std::string& identity : message.identities) add(frames, std::move(identity));
  frames.addmem(kDelimiter.data(), kDelimiter.size());
  add(frames, signer.sign({message.header, message.parent_header, message.metadata, message.content}));
  add(frames, std::move(message.header));
  add(frames, std::move(message.parent_header));
  add(frames, std::move(message.metadata));
  add(frames, std::move(message.content));
  for (std::string& buffer : message.buffers) add(frames, std::move(buffer));
  return frames;
}

std::optional<Message> from_frames(zmq::multipart_t& frames, const Signer& signer, std::string& why) {
  Message message;
  while (!frames.empty() && frames.front().to_string_view() != kDelimiter)
    message.identities.push_back(text_of(frames.pop()));
  if (frames.size() < 6) {
    why = "a message with too few parts";
    return std::nullopt;
  }
  frames.pop();
  const std::string signature = text_of(frames.pop());
  message.header = text_of(frames.pop());
  message.parent_header = text_of(frames.pop());
  message.metadata = text_of(frames.pop());
  message.content = text_of(frames.pop());
  if (!signer.verify(signature, {message.header, message.parent_header, message.metadata, message.content})) {
    why = "a message with a wrong signature";
    return std::nullopt;
  }
  while (!frames.empty()) message.buffers.push_back(text_of(frames.pop()));
  return message;
}

void send(zmq::multipart_t frames, zmq::socket_ref socket) {
  while (!frames.empty()) {
    zmq::message_t frame = frames.pop();
    const auto flags = frames.empty() ? zmq::send_flags::none : zmq::send_flags::sndmore;
    uninterrupted([&] { return socket.send(frame, flags); });
  }
}

bool receive(zmq::multipart_t& frames, zmq::socket_ref socket) {
  frames.clear();
  while (true) {
    zmq::message_t frame;
    if (!uninterrupted([&] { return socket.recv(frame, zmq::recv_flags::dontwait); })) return false;
    const bool more = frame.more();
    frames.add(std::move(frame));
    if (!more) return true;
  }
}

}  // namespace overmind::kernel
