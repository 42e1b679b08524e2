// SPDX-License-Identifier: MIT
// The socket of iopub that clients see, and the thread that forwards to it what `Publisher` sends in process.
#pragma once

#include <string>
#include <string_view>
#include <thread>
#include <zmq.hpp>

#include "kernel_ext/xeus/server.h"
#include "kernel_ext/xeus/wire.h"

namespace overmind::kernel {

// A client that subscribes is welcomed, as by ipykernel >= 7: without it jupyter_client waits for 0.2 s and asks once
// more, if its shell channel was connected before its iopub.
class Iopub {
 public:
  // Binds it, or throws zmq::error_t. Everything but `connection` must outlive it.
  Iopub(zmq::context_t& context, const Connection& connection, const Signer& signer, Session& session);
  ~Iopub();  // stop()
  Iopub(const Iopub&) = delete;
  Iopub& operator=(const Iopub&) = delete;

  int port() const;  // that it was bound to. REQUIRES: tcp

  // Starts the thread, deaf to signals. Once.
  void start();
  // After all that was published was forwarded. Idempotent.
  void stop();

  static constexpr const char* kEndPoint = "inproc://overmind-iopub";  // where Publisher sends to

 private:
  void forward();
  void welcome(std::string_view event);

  const Signer& signer_;
  Session& session_;
  zmq::socket_t clients_, published_, stop_, stopped_;
  std::thread thread_;
};

}  // namespace overmind::kernel
