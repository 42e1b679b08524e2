// SPDX-License-Identifier: MIT
// One kernel's channels: owns the server, the way to iopub, the output and the threads, in the order in which they
// may be taken down. No Python.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel_ext/xeus/capture.h"
#include "kernel_ext/xeus/control.h"
#include "kernel_ext/xeus/iopub.h"
#include "kernel_ext/xeus/output.h"
#include "kernel_ext/xeus/publisher.h"
#include "kernel_ext/xeus/server.h"

namespace overmind::kernel {

enum class Channel { kShell, kControl };

class Channels {
 public:
  // Binds; throws std::invalid_argument, zmq::error_t.
  Channels(const Connection& connection, const std::string& username);
  // Sends what was written, ends every thread. In a process that was forked from the owner it does nothing: its
  // threads are not there.
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  // With the ports that it was bound to.
  Connection connection() const;

  // Heartbeat, iopub and control begin. See Control for the arguments.
  void start(Control::Handler on_control, int parent_pid);
  // From here on control requests stay unanswered, and no thread of this calls Python. Waits for a request in hand.
  void stop_control();

  // Descriptors 1 and 2 are captured until `release_descriptors`.
  void capture_descriptors();
  void release_descriptors();
  int original_descriptor(Stream stream) const;  // -1 unless captured

  void reply(Channel channel, const Message& request, std::string_view msg_type, std::string metadata,
             std::string content, std::vector<std::string> buffers);
  // Asks the client of `request` (an input_request); see Server::ask.
  Message ask(const Message& request, std::string content, const std::function<void()>& check);

  // Everything written so far, by Python or below it, is published before this returns.
  void flush();

  bool is_control_thread() const { return control_ && control_->is_current_thread(); }
  bool is_forked() const;

  Server& server() { return *server_; }
  Publisher& publisher() { return *publisher_; }
  Output& output() { return *output_; }
  const Session& session() const { return session_; }

 private:
  int owner_pid_;
  Signer signer_;
  Session session_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Iopub> iopub_;
  std::unique_ptr<Publisher> publisher_;
  std::unique_ptr<Output> output_;
  std::unique_ptr<Capture> capture_;
  std::unique_ptr<Control> control_;
};

}  // namespace overmind::kernel
