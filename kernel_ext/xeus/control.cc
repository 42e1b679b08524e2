// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/control.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "kernel_ext/xeus/signals_blocked.h"

namespace overmind::kernel {
namespace {

// A descriptor that becomes readable when `pid` ends; invalid where that can't be had. A parent that is gone
// already is told by getppid(): a pid may also be one of another namespace, and mean nothing here.
UniqueFd watch(int pid) {
  if (pid <= 1) return {};
  UniqueFd fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!fd.valid() && errno == ESRCH && getppid() == 1) _exit(1);
  return fd;
}

// The group, so that the programs which a cell runs are interrupted, too: but only if it is the kernel's own.
std::string interrupt_group() {
  const pid_t pid = getpid();
  const int result = getpgid(0) == pid ? killpg(pid, SIGINT) : kill(pid, SIGINT);
  if (result == 0) return R"({"status":"ok"})";
  std::string content = R"({"status":"error","ename":"OSError","traceback":[],"evalue":)";
  append_json_string(content, std::strerror(errno));
  return content + "}";
}

bool is_interrupt(const Message& message) {
  const auto header = nlohmann::json::parse(message.header, nullptr, false);
  const auto found = header.is_object() ? header.find("msg_type") : header.end();
  return header.is_object() && found != header.end() && *found == "interrupt_request";
}

}  // namespace

Control::Control(Server& server, Publisher& publisher, Session& session, Handler handler, int parent_pid)
    : server_(server),
      publisher_(publisher),
      session_(session),
      handler_(std::move(handler)),
      stop_(eventfd(0, EFD_CLOEXEC)),
      parent_(watch(parent_pid)) {
  if (!stop_.valid()) throw std::system_error(errno, std::generic_category(), "eventfd");
  const SignalsBlocked blocked;
  thread_ = std::thread(&Control::run, this);
}

Control::~Control() {
  const std::uint64_t one = 1;
  if (write(stop_.get(), &one, sizeof one) == sizeof one) thread_.join();
}

void Control::run() {
  std::array<pollfd, 3> fds = {
      {{server_.control_fd(), POLLIN, 0}, {stop_.get(), POLLIN, 0}, {parent_.get(), POLLIN, 0}}};
  while (true) {
    while (auto message = server_.read_control()) handle(std::move(*message));
    if (poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return;
    if (fds[1].revents != 0) return;
    if (fds[2].revents != 0) _exit(1);
  }
}

void Control::handle(Message message) {
  try {
    if (is_interrupt(message))
      interrupt(message);
    else
      handler_(std::make_shared<const Message>(std::move(message)));
  } catch (const std::exception& error) {
    std::cerr << "overmind kernel: control channel: " << error.what() << std::endl;
  }
}

void Control::interrupt(const Message& request) {
  publisher_.status("busy", &request);
  Message reply;
  reply.identities = request.identities;
  reply.header = session_.header("interrupt_reply");
  reply.parent_header = request.header;
  reply.content = interrupt_group();
  server_.send_control(reply);
  publisher_.status("idle", &request);
}

}  // namespace overmind::kernel
