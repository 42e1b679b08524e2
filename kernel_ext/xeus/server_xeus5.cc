// SPDX-License-Identifier: MIT
// Server over xeus >= 5 and xeus-zmq: xserver_zmq_split has the sockets and the heartbeat thread. Its shell and control
// loops are not used, because they have no room for asyncio; nor is its iopub, whose welcome has a null for its parent:
// clients that look into it fail, in the middle of a cell.
//
// What this API can't do, and 2.4 can: requests pass through nlohmann::json, so integers over 64 bits become
// floating-point numbers, and one with half of a UTF-16 pair in it is dropped; `ask` can't tell a late answer to an
// older question unless the client says what it answers; an interrupt between its check and its wait is seen at the
// next one; a signal that comes while the question is sent, and raises nothing, may keep it from the client.
#include <cerrno>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <xeus-zmq/xmiddleware.hpp>
#include <xeus-zmq/xserver_zmq_split.hpp>
#include <xeus-zmq/xzmq_context.hpp>
#include <xeus/xeus.hpp>
#include <xeus/xkernel_configuration.hpp>
#include <zmq_addon.hpp>

#include "kernel_ext/xeus/ports.h"
#include "kernel_ext/xeus/server.h"
#include "kernel_ext/xeus/signals_blocked.h"

namespace overmind::kernel {
namespace {

using nlohmann::json;

#if XEUS_VERSION_MAJOR >= 6
using Ports = xeus::xkernel_configuration;
#else
using Ports = xeus::xconfiguration;
#endif

// A ROUTER drops what goes to a client that it does not know: sending there is how to wait without asking again.
const std::string kNobody = "overmind: nobody";

Ports to_xeus(const Connection& connection) {
  auto ports = places_of<Ports>(connection);
  ports.m_signature_scheme = connection.key.empty() ? "none" : connection.scheme;
  ports.m_key = connection.key;
  return ports;
}

std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

Message from_xeus(xeus::xmessage message) {
  Message result;
  result.identities = message.identities();
  result.header = dump(message.header());
  result.parent_header = dump(message.parent_header());
  result.metadata = dump(message.metadata());
  result.content = dump(message.content());
  for (const xeus::binary_buffer& buffer : message.buffers()) result.buffers.emplace_back(buffer.begin(), buffer.end());
  return result;
}

xeus::xmessage to_xeus(const Message& message) {
  xeus::buffer_sequence buffers;
  for (const std::string& buffer : message.buffers) buffers.emplace_back(buffer.begin(), buffer.end());
  return {message.identities,
          json::parse(message.header),
          json::parse(message.parent_header),
          json::parse(message.metadata),
          json::parse(message.content),
          std::move(buffers)};
}

struct NoControl final : xeus::xcontrol_runner {
  void run_impl() override {}
  void stop_impl() override {}
};

struct NoShell final : xeus::xshell_runner {
  void run_impl() override {}
};

class Sockets final : public xeus::xserver_zmq_split {
 public:
  Sockets(xeus::xcontext& context, const Ports& ports)
      : xserver_zmq_split(context, ports, json::error_handler_t::replace, std::make_unique<NoControl>(),
                          std::make_unique<NoShell>()) {}

  using xserver_zmq_split::start_heartbeat_thread;
  using xserver_zmq_split::start_publisher_thread;

 private:
  void start_impl(xeus::xpub_message) override {}
};

class Xeus5 final : public Server {
 public:
  Xeus5(Connection connection, const Signer&)
      : connection_(std::move(connection)),
        context_(xeus::make_zmq_context()),
        sockets_(*context_, to_xeus(connection_)) {
    sockets_.register_stdin_listener([this](xeus::xmessage answer) { answer_ = from_xeus(std::move(answer)); });
    if (connection_.transport != "tcp") return;
    take_ports<Ports>(sockets_, connection_);
  }

  Connection connection() const override { return connection_; }
  zmq::context_t& context() override { return context_->get_wrapped_context<zmq::context_t>(); }

  void start() override {
    const SignalsBlocked blocked;
    sockets_.start_publisher_thread();  // forwards nothing; xeus waits for it when it stops
    sockets_.start_heartbeat_thread();
    started_ = true;
  }

  int shell_fd() const override { return sockets_.get_shell_fd(); }
  std::optional<Message> read_shell() override {
    const SignalsBlocked blocked;  // EINTR would lose what was read of a message
    while (true) {
      if (auto message = sockets_.read_shell(ZMQ_DONTWAIT)) return from_xeus(std::move(*message));
      // Nothing also stands for a message that xeus dropped: others may be behind it.
      if (sockets_.poll_shell_channels(0) != xeus::channel::SHELL) return std::nullopt;
    }
  }
  void send_shell(const Message& reply) override {
    const SignalsBlocked blocked;  // EINTR would leave a part of a message in the socket
    sockets_.send_shell_message(to_xeus(reply));
  }

  int control_fd() const override { return sockets_.get_control_fd(); }
  std::optional<Message> read_control() override {
    if (auto message = sockets_.read_control(ZMQ_DONTWAIT)) return from_xeus(std::move(*message));
    return std::nullopt;
  }
  void send_control(const Message& reply) override { sockets_.send_control_message(to_xeus(reply)); }

  Message ask(const Message& request, const std::function<void()>& check) override {
    const std::lock_guard lock(stdin_mutex_);
    const std::string id = json::parse(request.header).value("msg_id", "");
    Message to_send = request;
    while (true) {
      answer_.reset();
      try {
        sockets_.send_stdin(to_xeus(to_send));
      } catch (const zmq::error_t& error) {
        if (error.num() != EINTR) throw;
      }
      check();
      if (answer_ && answers(*answer_, id)) return std::move(*answer_);
      to_send.identities = {kNobody};
    }
  }

  void stop() override {
    if (!std::exchange(started_, false)) return;
    // xeus also waits for its shell loop to say that it stopped.
    std::thread shell([this] {
      if (auto word = sockets_.read_shell_controller(0)) sockets_.send_shell_controller(std::move(*word));
    });
    sockets_.stop_channels();
    shell.join();
  }

 private:
  // Frontends say what they answer; jupyter_client's blocking client does not.
  static bool answers(const Message& answer, const std::string& id) {
    const json parent = json::parse(answer.parent_header);
    const std::string said = parent.is_object() ? parent.value("msg_id", "") : "";
    return said.empty() || said == id;
  }

  Connection connection_;
  std::unique_ptr<xeus::xcontext> context_;  // before the sockets: it must go last
  Sockets sockets_;
  std::mutex stdin_mutex_;
  std::optional<Message> answer_;
  bool started_ = false;
};

}  // namespace

std::unique_ptr<Server> make_server(const Connection& connection, const Signer& signer) {
  return std::make_unique<Xeus5>(connection, signer);
}

std::string xeus_version() { return compiled_xeus_version(); }

}  // namespace overmind::kernel
