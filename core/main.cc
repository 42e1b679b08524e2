// SPDX-License-Identifier: MIT
// overmindd: the store of one user, in the background. Started by the first client that needs it, or
// by hand.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "core/daemon.h"

namespace {

constexpr const char* kUsage =
    "usage: overmindd [--runtime-dir=DIR] [--budget=SIZE] [--log-level=LEVEL] [--idle-exit=SECONDS]\n"
    "                 [--ready-fd=N] [--version] [--help]\n"
    "Starts the store of this user in the background; what is not given comes from OVERMIND_*.\n";

template <typename T>
bool parse_number(std::string_view text, T& value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= T{};
}

// One "--name=value". False: not an option, or not a value for it.
bool parse_option(std::string_view argument, overmind::DaemonOptions& options) {
  std::size_t equals = argument.find('=');
  if (equals == std::string_view::npos) return false;
  std::string_view name = argument.substr(0, equals);
  std::string_view value = argument.substr(equals + 1);
  if (name == "--runtime-dir") return !(options.config.runtime_dir = value).empty();
  if (name == "--budget") return !(options.config.budget = value).empty();
  if (name == "--log-level") return !(options.config.log_level = value).empty();
  if (name == "--idle-exit") return parse_number(value, options.config.idle_exit_seconds);
  if (name == "--ready-fd") return parse_number(value, options.ready_fd) && options.ready_fd > 2;
  if (name == "--adopt-server") return parse_number(value, options.adopt_server);
  return false;
}

int exit_code(overmind::DaemonExit exit) { return static_cast<int>(exit); }

}  // namespace

int main(int argc, char** argv) {
  overmind::DaemonOptions options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--version") == 0) return std::puts("overmindd " OVERMIND_VERSION) < 0;
    if (std::strcmp(argv[i], "--help") == 0) return std::fputs(kUsage, stdout) < 0;
  }

  // What the environment says, then what the arguments say.
  overmind::Result<overmind::Config> config = overmind::Config::from_environment();
  if (!config.ok()) {
    std::fprintf(stderr, "overmindd: %s\n", config.status().to_string().c_str());
    return exit_code(overmind::DaemonExit::kUsage);
  }
  options.config = std::move(config).value();
  for (int i = 1; i < argc; ++i) {
    if (parse_option(argv[i], options)) continue;
    std::fprintf(stderr, "overmindd: what is '%s'?\n%s", argv[i], kUsage);
    return exit_code(overmind::DaemonExit::kUsage);
  }

  // Lock, socket, log; detach; keep what is committed and serve.
  return exit_code(overmind::run_daemon(std::move(options)));
}
