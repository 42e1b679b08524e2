// SPDX-License-Identifier: MIT
// Server over xeus 2.4: xserver_zmq binds the sockets and has the heartbeat thread; its own loop over the channels is
// not used, because it has no room for asyncio, nor is its iopub, which welcomes nobody.
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <xeus/xeus.hpp>
#include <xeus/xserver_zmq.hpp>

#include "kernel_ext/xeus/frames.h"
#include "kernel_ext/xeus/ports.h"
#include "kernel_ext/xeus/server.h"
#include "kernel_ext/xeus/signals_blocked.h"
#include "kernel_ext/xeus/xeus_includes.h"

namespace overmind::kernel {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(50);

xeus::xconfiguration to_xeus(const Connection& connection) {
  auto config = places_of<xeus::xconfiguration>(connection);
  config.m_signature_scheme = "none";  // signing is ours: xeus reads past the end of a signature that is too short
  return config;
}

// Opens what xeus keeps for those who derive from it.
class Sockets final : public xeus::xserver_zmq {
 public:
  Sockets(zmq::context_t& context, const xeus::xconfiguration& config)
      : xserver_zmq(context, config, nl::json::error_handler_t::replace) {
    // A client that reconnects under its old identity takes its place, as with ipykernel.
    for (zmq::socket_t* socket : {&m_shell, &m_controller, &m_stdin}) socket->set(zmq::sockopt::router_handover, true);
  }

  using xserver_zmq::m_controller;
  using xserver_zmq::m_shell;
  using xserver_zmq::m_stdin;
  using xserver_zmq::start_heartbeat_thread;
  using xserver_zmq::start_publisher_thread;
  using xserver_zmq::stop_channels;
};

class Xeus2 final : public Server {
 public:
  Xeus2(Connection connection, const Signer& signer)
      : connection_(std::move(connection)), signer_(signer), sockets_(context_, to_xeus(connection_)) {
    if (connection_.transport == "tcp") take_ports<xeus::xconfiguration>(sockets_, connection_);
  }

  Connection connection() const override { return connection_; }
  zmq::context_t& context() override { return context_; }

  void start() override {
    const SignalsBlocked blocked;
    sockets_.start_publisher_thread();  // forwards nothing; xeus waits for it when it stops
    sockets_.start_heartbeat_thread();
    started_ = true;
  }

  int shell_fd() const override { return sockets_.m_shell.get(zmq::sockopt::fd); }
  std::optional<Message> read_shell() override { return read(sockets_.m_shell); }
  void send_shell(const Message& reply) override { send(to_frames(reply, signer_), sockets_.m_shell); }

  int control_fd() const override { return sockets_.m_controller.get(zmq::sockopt::fd); }
  std::optional<Message> read_control() override { return read(sockets_.m_controller); }
  void send_control(const Message& reply) override { send(to_frames(reply, signer_), sockets_.m_controller); }

  Message ask(const Message& request, const std::function<void()>& check) override {
    const std::lock_guard lock(stdin_mutex_);  // the user's threads may ask, too
    while (read(sockets_.m_stdin).has_value()) continue;
    send(to_frames(request, signer_), sockets_.m_stdin);
    while (true) {
      if (auto reply = read(sockets_.m_stdin)) return std::move(*reply);
      wait_readable(sockets_.m_stdin);
      check();
    }
  }

  void stop() override {
    if (started_) sockets_.stop_channels();
    started_ = false;
  }

 private:
  std::optional<Message> read(zmq::socket_t& socket) {
    zmq::multipart_t frames;
    while (receive(frames, socket)) {
      std::string why;
      if (auto message = from_frames(frames, signer_, why)) return message;
      std::cerr << "overmind kernel: dropped " << why << std::endl;
    }
    return std::nullopt;
  }

  static void wait_readable(zmq::socket_t& socket) {
    zmq::pollitem_t item = {socket.handle(), 0, ZMQ_POLLIN, 0};
    try {
      zmq::poll(&item, 1, kCheckInterval);
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) throw;
    }
  }

  Connection connection_;
  const Signer& signer_;
  zmq::context_t context_;  // before the sockets: it must go last
  Sockets sockets_;
  std::mutex stdin_mutex_;
  bool started_ = false;
};

}  // namespace

std::unique_ptr<Server> make_server(const Connection& connection, const Signer& signer) {
  return std::make_unique<Xeus2>(connection, signer);
}

std::string xeus_version() { return compiled_xeus_version(); }

}  // namespace overmind::kernel
