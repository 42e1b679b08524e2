// SPDX-License-Identifier: MIT
// The way to iopub: from any thread, in order, into xeus's iopub thread.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>
#include <zmq.hpp>

#include "kernel_ext/xeus/server.h"
#include "kernel_ext/xeus/wire.h"

namespace overmind::kernel {

class Publisher {
 public:
  // All three must outlive it.
  Publisher(Server& server, const Signer& signer, Session& session);

  // Thread-safe; never waits for a client. `parent` is the request that this answers; null: none. The other texts
  // are JSON.
  void publish(std::string topic, std::string_view msg_type, const Message* parent, std::string metadata,
               std::string content, std::vector<std::string> buffers = {});

  // status: "busy", "idle", "starting".
  void status(std::string_view state, const Message* parent);

 private:
  const Signer& signer_;
  Session& session_;
  std::mutex mutex_;  // a ZeroMQ socket may change threads only with a fence between
  zmq::socket_t socket_;
};

}  // namespace overmind::kernel
