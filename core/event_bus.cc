// SPDX-License-Identifier: MIT
#include "core/event_bus.h"

#include <zmq.h>

#include <nlohmann/json.hpp>

namespace overmind {
namespace {

constexpr int kQueuedMessages = 256;  // per subscriber

std::string hex(const Key& key) {
  std::string text;
  for (std::uint8_t byte : key) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace

std::string to_json(const Event& event) {
  nlohmann::json json = {{"event", event.name},      {"id", event.id == 0 ? "" : entry_id_to_string(event.id)},
                         {"key", hex(event.key)},    {"loader", event.loader},
                         {"target", event.target},   {"nbytes", event.nbytes},
                         {"written", event.written}, {"bytes_per_second", event.bytes_per_second},
                         {"reason", event.reason}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<std::unique_ptr<EventBus>> EventBus::bind(const std::string& path) {
  void* context = ::zmq_ctx_new();
  void* socket = context == nullptr ? nullptr : ::zmq_socket(context, ZMQ_PUB);
  if (socket == nullptr) {
    Status failed(Code::kUnavailable, std::string("ZeroMQ: ") + ::zmq_strerror(::zmq_errno()));
    if (context != nullptr) ::zmq_ctx_term(context);
    return failed;
  }
  std::unique_ptr<EventBus> bus(new EventBus(context, socket));
  int linger = 0;
  ::zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof(linger));
  ::zmq_setsockopt(socket, ZMQ_SNDHWM, &kQueuedMessages, sizeof(kQueuedMessages));
  if (::zmq_bind(socket, ("ipc://" + path).c_str()) != 0) {
    return Status(Code::kUnavailable, "event bus at " + path + ": " + ::zmq_strerror(::zmq_errno()));
  }
  return bus;
}

EventBus::~EventBus() {
  ::zmq_close(socket_);
  ::zmq_ctx_term(context_);
}

void EventBus::send(const Event& event) {
  std::string json = to_json(event);
  if (::zmq_send(socket_, event.name.data(), event.name.size(), ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) return;
  ::zmq_send(socket_, json.data(), json.size(), ZMQ_DONTWAIT);
}

}  // namespace overmind
