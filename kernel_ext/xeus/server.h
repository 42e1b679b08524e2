// SPDX-License-Identifier: MIT
// The sockets and threads that xeus owns, all but iopub's, as the rest of the kernel sees them: the one door to both
// xeus APIs. server_xeus2.cc is compiled against xeus 2.4 (Debian 12), server_xeus5.cc against xeus >= 5 with xeus-zmq.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <zmq.hpp>

#include "kernel_ext/xeus/wire.h"

namespace overmind::kernel {

// A connection file. Port 0 lets the system choose; Server::connection() tells what it chose.
struct Connection {
  std::string transport = "tcp";  // "tcp" or "ipc"
  std::string ip;                 // with ipc: the beginning of the sockets' paths
  std::string key;
  std::string scheme = "hmac-sha256";
  int shell_port = 0, control_port = 0, stdin_port = 0, iopub_port = 0, hb_port = 0;
};

// Which thread may call what: shell and stdin members belong to one thread (the main one), control members to
// another (control.h). ZeroMQ errors come as zmq::error_t.
class Server {
 public:
  virtual ~Server() = default;

  virtual Connection connection() const = 0;  // iopub's port is not bound here: see Iopub
  virtual zmq::context_t& context() = 0;

  // Starts the heartbeat thread, deaf to signals. Once.
  virtual void start() = 0;

  // Readable when there may be something to read. Edge-triggered, and any send can swallow an edge: after a send, and
  // before waiting, read until nothing comes.
  virtual int shell_fd() const = 0;
  // Never wait. Messages that are malformed or have a wrong signature are dropped, with a line on stderr.
  virtual std::optional<Message> read_shell() = 0;
  virtual void send_shell(const Message& reply) = 0;

  virtual int control_fd() const = 0;
  virtual std::optional<Message> read_control() = 0;
  virtual void send_control(const Message& reply) = 0;

  // Sends an input_request and waits for its answer; answers to older requests are dropped. Calls `check` after every
  // signal, and a few times a second; what it throws ends the wait.
  virtual Message ask(const Message& request, const std::function<void()>& check) = 0;

  // Ends the heartbeat.
  virtual void stop() = 0;
};

// Binds all sockets but iopub's, or throws zmq::error_t, having bound none. The signer must outlive the server.
std::unique_ptr<Server> make_server(const Connection& connection, const Signer& signer);

// "2.4.1": the xeus that this was compiled against.
std::string xeus_version();

}  // namespace overmind::kernel
