// SPDX-License-Identifier: MIT
// A connection in the words of xeus, whose configuration has one text for each port, and how xeus calls itself: the
// same in all its APIs.
#pragma once

#include <array>
#include <string>
#include <xeus/xeus.hpp>

#include "kernel_ext/xeus/server.h"

namespace overmind::kernel {

template <typename Configuration>
struct PortPair {
  int Connection::*ours;
  std::string Configuration::*theirs;
};

// Not iopub's: xeus's own goes where nobody is told of, and Iopub binds the one that clients know.
template <typename Configuration>
constexpr std::array<PortPair<Configuration>, 4> kPortPairs = {{
    {&Connection::shell_port, &Configuration::m_shell_port},
    {&Connection::control_port, &Configuration::m_control_port},
    {&Connection::stdin_port, &Configuration::m_stdin_port},
    {&Connection::hb_port, &Configuration::m_hb_port},
}};

// Transport, address and ports; not the signature scheme.
template <typename Configuration>
Configuration places_of(const Connection& connection) {
  Configuration configuration;
  configuration.m_transport = connection.transport;
  configuration.m_ip = connection.ip;
  for (const auto& port : kPortPairs<Configuration>) configuration.*port.theirs = std::to_string(connection.*port.ours);
  configuration.m_iopub_port = connection.transport == "tcp" ? "0" : "unused";
  return configuration;
}

// The ports that `sockets` (an xserver_zmq) was bound to.
template <typename Configuration, typename Sockets>
void take_ports(Sockets& sockets, Connection& connection) {
  Configuration bound;
  sockets.update_config(bound);
  for (const auto& port : kPortPairs<Configuration>) connection.*port.ours = std::stoi(bound.*port.theirs);
}

inline std::string compiled_xeus_version() {
  return std::to_string(XEUS_VERSION_MAJOR) + "." + std::to_string(XEUS_VERSION_MINOR) + "." +
         std::to_string(XEUS_VERSION_PATCH);
}

}  // namespace overmind::kernel
