// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/channels.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace overmind::kernel {

Channels::Channels(const Connection& connection, const std::string& username)
    : owner_pid_(getpid()),
      signer_(connection.scheme, connection.key),
      session_(username),
      server_(make_server(connection, signer_)),
      iopub_(std::make_unique<Iopub>(server_->context(), connection, signer_, session_)),
      publisher_(std::make_unique<Publisher>(server_->context(), signer_, session_)),
      output_(std::make_unique<Output>(*publisher_)) {}

Channels::~Channels() {
  if (is_forked()) {
    static_cast<void>(control_.release());
    static_cast<void>(capture_.release());
    static_cast<void>(output_.release());
    static_cast<void>(publisher_.release());
    static_cast<void>(iopub_.release());
    static_cast<void>(server_.release());
    return;
  }
  control_.reset();
  capture_.reset();
  output_.reset();
  publisher_.reset();
  iopub_.reset();
  server_->stop();
}

Connection Channels::connection() const {
  Connection bound = server_->connection();
  if (bound.transport == "tcp") bound.iopub_port = iopub_->port();
  return bound;
}

void Channels::start(Control::Handler on_control, int parent_pid) {
  iopub_->start();
  server_->start();
  control_ = std::make_unique<Control>(*server_, *publisher_, session_, std::move(on_control), parent_pid);
}

void Channels::stop_control() { control_.reset(); }

void Channels::capture_descriptors() {
  if (!capture_) capture_ = std::make_unique<Capture>(*output_);
}

void Channels::release_descriptors() { capture_.reset(); }

int Channels::original_descriptor(Stream stream) const { return capture_ ? capture_->original(stream) : -1; }

void Channels::reply(Channel channel, const Message& request, std::string_view msg_type, std::string metadata,
                     std::string content, std::vector<std::string> buffers) {
  Message message;
  message.identities = request.identities;
  message.header = session_.header(msg_type);
  message.parent_header = request.header;
  message.metadata = std::move(metadata);
  message.content = std::move(content);
  message.buffers = std::move(buffers);
  if (channel == Channel::kShell)
    server_->send_shell(message);
  else
    server_->send_control(message);
}

Message Channels::ask(const Message& request, std::string content, const std::function<void()>& check) {
  Message question;
  question.identities = request.identities;
  question.header = session_.header("input_request");
  question.parent_header = request.header;
  question.content = std::move(content);
  return server_->ask(question, check);
}

void Channels::flush() {
  if (is_forked()) return;
  if (capture_) {
    std::fflush(stdout);  // to a pipe, C's own buffer would hold printf's text back
    capture_->drain();
  }
  output_->flush();
}

bool Channels::is_forked() const { return getpid() != owner_pid_; }

}  // namespace overmind::kernel
