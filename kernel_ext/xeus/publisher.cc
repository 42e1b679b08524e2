// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/publisher.h"

#include <utility>

#include "kernel_ext/xeus/frames.h"
#include "kernel_ext/xeus/xeus_includes.h"

namespace overmind::kernel {

Publisher::Publisher(Server& server, const Signer& signer, Session& session)
    : signer_(signer), session_(session), socket_(server.context(), zmq::socket_type::pub) {
  // No limit: a PUB socket drops what goes over it, and xeus's thread may be slower than a loop of displays.
  socket_.set(zmq::sockopt::sndhwm, 0);
  socket_.set(zmq::sockopt::linger, xeus::get_socket_linger());
  socket_.connect(server.iopub_end_point());
}

void Publisher::publish(std::string topic, std::string_view msg_type, const Message* parent, std::string metadata,
                        std::string content, std::vector<std::string> buffers) {
  Message message;
  message.identities.push_back(std::move(topic));
  message.header = session_.header(msg_type);
  if (parent != nullptr) message.parent_header = parent->header;
  message.metadata = std::move(metadata);
  message.content = std::move(content);
  message.buffers = std::move(buffers);
  zmq::multipart_t frames = to_frames(std::move(message), signer_);
  const std::lock_guard lock(mutex_);
  send(std::move(frames), socket_);
}

void Publisher::status(std::string_view state, const Message* parent) {
  std::string content = "{\"execution_state\":\"";
  content += state;
  content += "\"}";
  publish("kernel." + session_.id() + ".status", "status", parent, "{}", std::move(content));
}

}  // namespace overmind::kernel
