// SPDX-License-Identifier: MIT
// overmind-launch: starts a script, a module or a kernel as a fork of a process that has its imports done, or
// plainly where there is none. See README.md.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "core/config.h"
#include "kernel_ext/launcher/facts.h"
#include "kernel_ext/launcher/mirror.h"
#include "kernel_ext/launcher/plain.h"
#include "kernel_ext/launcher/request.h"

namespace {

using namespace overmind;
using namespace overmind::launcher;

constexpr const char* kUsage =
    "usage: overmind-launch --python=PYTHON --boot=BOOT run SCRIPT [ARGUMENT]...\n"
    "       overmind-launch --python=PYTHON --boot=BOOT run -m MODULE [ARGUMENT]...\n"
    "       overmind-launch --python=PYTHON --boot=BOOT kernel ENGINE [ARGUMENT]...\n"
    "`overmind run` and `overmind kernel install` fill in PYTHON and BOOT.\n";

bool parse(int argc, char** argv, Options& options) {
  int at = 1;
  for (; at < argc && std::strncmp(argv[at], "--", 2) == 0; ++at) {
    const std::string_view word = argv[at];
    if (word.starts_with("--python=")) {
      options.python = word.substr(9);
    } else if (word.starts_with("--boot=")) {
      options.boot = word.substr(7);
    } else {
      return false;
    }
  }
  if (argc - at < 2 || !options.python.starts_with('/') || !options.boot.starts_with('/')) return false;
  const std::string_view verb = argv[at++];
  if (verb == "kernel") {
    options.mode = "kernel";
  } else if (verb == "run") {
    options.mode = std::strcmp(argv[at], "-m") == 0 ? "module" : "script";
    if (options.mode == "module" && ++at == argc) return false;
  } else {
    return false;
  }
  options.target = argv[at++];
  options.argv.assign(argv + at, argv + argc);
  return true;
}

// Why no zygote is used at all; empty if one may be.
std::string switched_off(const Config& config) {
  if (config.disabled) return "OVERMIND_DISABLE is set";
  if (!config.zygote) return "OVERMIND_ZYGOTE is 0";
  for (const std::string& folder : {config.runtime_dir, config.instance_dir()})
    if (Status status = ensure_private_dir(folder); !status.ok()) return status.message();
  return {};
}

int start(const Options& options, const Inherited& inherited) {
  // A folder, an archive, a file that isn't there: the interpreter knows what to do.
  if (options.mode == "script" && !is_source(options.target)) return run_bare(options).ok();
  const Result<Config> config = Config::from_environment();
  std::string reason = config.ok() ? switched_off(config.value()) : config.status().message();
  if (!reason.empty()) return run_plain(options, nullptr, "").ok();
  const std::string log_path = config.value().launcher_log_path();
  reason = only_plain();
  if (!reason.empty()) {
    log_line(log_path, "plain start of " + options.target + ": " + reason);
    return run_plain(options, nullptr, log_path).ok();
  }
  const Place place = place_of(options, config.value().instance_dir());
  // From before the program can run: a signal that comes meanwhile is passed on, or waits for the plain start.
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_BLOCK, &all, nullptr);
  Result<Started> started = ask(options, place, inherited);
  if (started.ok()) mirror(options, std::move(started).value());
  ::sigprocmask(SIG_SETMASK, &inherited.blocked, nullptr);
  log_line(log_path, "plain start of " + options.target + ": " + started.status().message());
  return run_plain(options, &place, log_path).ok();
}

}  // namespace

int main(int argc, char** argv) {
  const Inherited inherited = Inherited::now();
  Options options;
  if (!parse(argc, argv, options)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  start(options, inherited);
  std::fprintf(stderr, "overmind-launch: can't run %s: %s\n", options.python.c_str(), std::strerror(errno));
  return 127;
}
