// SPDX-License-Identifier: MIT
// The way to iopub: from any thread, in order, into the thread of `Iopub`.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>
#include <zmq.hpp>

#include "kernel_ext/xeus/wire.h"

namespace overmind::kernel {

class Publisher {
 public:
  // All three must outlive it. REQUIRES: an Iopub in this context.
  Publisher(zmq::context_t& context, const Signer& signer, Session& session);

  // Thread-safe; never waits for a client, but for its turn (see kRate). `parent` is the request that this answers;
  // null: none. The other texts are JSON.
  void publish(std::string topic, std::string_view msg_type, const Message* parent, std::string metadata,
               std::string content, std::vector<std::string> buffers = {});

  // status: "busy", "idle", "starting".
  void status(std::string_view state, const Message* parent);

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point next_turn();

  const Signer& signer_;
  Session& session_;
  std::mutex mutex_;  // a ZeroMQ socket may change threads only with a fence between
  zmq::socket_t socket_;
  Clock::time_point turn_;  // of the message sent last
};

}  // namespace overmind::kernel
