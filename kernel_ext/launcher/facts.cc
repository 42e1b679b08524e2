// SPDX-License-Identifier: MIT
#include "kernel_ext/launcher/facts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/personality.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <vector>

#include "core/config.h"
#include "core/unique_fd.h"

namespace overmind::launcher {
namespace {

// Variables that differ from one terminal or kernel to the next and that no import reads into a module. Any other
// variable that differs makes another zygote: which of them an import reads can't be known from outside.
constexpr std::string_view kFree[] = {"COLORTERM",
                                      "COLUMNS",
                                      "DBUS_SESSION_BUS_ADDRESS",
                                      "DISPLAY",
                                      "GPG_TTY",
                                      "INVOCATION_ID",
                                      "JOURNAL_STREAM",
                                      "JPY_PARENT_PID",
                                      "JPY_SESSION_NAME",
                                      "KERNEL_ID",
                                      "LINES",
                                      "MEMORY_PRESSURE_WATCH",
                                      "MEMORY_PRESSURE_WRITE",
                                      "OLDPWD",
                                      "PWD",
                                      "PYTEST_CURRENT_TEST",
                                      "SHLVL",
                                      "STY",
                                      "SYSTEMD_EXEC_PID",
                                      "TERM_SESSION_ID",
                                      "TMUX",
                                      "TMUX_PANE",
                                      "WINDOW",
                                      "WINDOWID",
                                      "XDG_SESSION_ID",
                                      "_"};
constexpr std::string_view kFreePrefixes[] = {"SSH_", "VSCODE_"};

bool is_free(std::string_view entry) {
  const std::string_view name = entry.substr(0, entry.find('='));
  return is_own_free_variable(name) || std::find(std::begin(kFree), std::end(kFree), name) != std::end(kFree) ||
         std::any_of(std::begin(kFreePrefixes), std::end(kFreePrefixes),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

std::string read_file(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char part[4096];
  for (ssize_t got; fd.valid() && (got = ::read(fd.get(), part, sizeof(part))) > 0;)
    text.append(part, static_cast<std::size_t>(got));
  return text;
}

std::string read_link(const std::string& path) {
  char target[4096];
  const ssize_t size = ::readlink(path.c_str(), target, sizeof(target));
  return size < 0 ? std::string() : std::string(target, static_cast<std::size_t>(size));
}

void add(std::string& key, std::string_view name, std::string_view value) {
  key.append(name).append("=").append(value).push_back('\0');
}

void add_environment(std::string& key) {
  std::vector<std::string_view> entries;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (!is_free(*entry)) entries.emplace_back(*entry);
  std::sort(entries.begin(), entries.end());
  for (std::string_view entry : entries) add(key, "env", entry);
}

// Credentials, capabilities, seccomp, affinity.
void add_status(std::string& key) {
  constexpr std::string_view kFields[] = {"Uid:", "Gid:",          "Groups:",       "NoNewPrivs:",  "Seccomp:",
                                          "Cap",  "Cpus_allowed:", "Mems_allowed:", "THP_enabled:", "Speculation"};
  const std::string status = read_file("/proc/self/status");
  for (std::size_t at = 0; at < status.size();) {
    const std::size_t end = std::min(status.find('\n', at), status.size());
    const std::string_view line = std::string_view(status).substr(at, end - at);
    for (std::string_view field : kFields)
      if (line.starts_with(field)) add(key, "status", line);
    at = end + 1;
  }
}

void add_process(std::string& key) {
  add_status(key);
  for (const char* name : {"limits", "cgroup", "oom_score_adj", "attr/current", "timerslack_ns"})
    add(key, name, read_file(std::string("/proc/self/") + name));
  for (const char* name : {"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"})
    add(key, name, read_link(std::string("/proc/self/ns/") + name));
  add(key, "root", read_link("/proc/self/root"));
  add(key, "personality", std::to_string(::personality(0xffffffff)));
  add(key, "nice", std::to_string(::getpriority(PRIO_PROCESS, 0)));
  add(key, "policy", std::to_string(::sched_getscheduler(0)));
  add(key, "io", std::to_string(::syscall(SYS_ioprio_get, 1, 0)));
}

std::string hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a; a collision is found by comparing the whole text
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

// Starts of one kind import the same things: a script by its file, a module by its name and folder, kernels together.
std::string kind_of(const Options& options) {
  std::error_code ignored;
  if (options.mode == "script") return "script:" + std::filesystem::canonical(options.target, ignored).string();
  if (options.mode == "module")
    return "module:" + options.target + ":" + std::filesystem::current_path(ignored).string();
  return options.mode + ":" + options.target;
}

// Entries that depend on the working folder, which a zygote doesn't share.
bool has_relative_path(const char* list) {
  if (list == nullptr || *list == '\0') return false;
  const std::string_view text(list);
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(':', at), text.size());
    if (end == at || text[at] != '/') return true;
    at = end + 1;
  }
  return false;
}

}  // namespace

std::string stamp_of(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return "none";
  return std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino) + ":" + std::to_string(info.st_size) + ":" +
         std::to_string(info.st_mtim.tv_sec) + "." + std::to_string(info.st_mtim.tv_nsec);
}

bool is_source(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || path.ends_with(".pyc")) return false;
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char head[4] = {};
  if (!fd.valid() || ::read(fd.get(), head, sizeof(head)) < 0) return false;
  return std::memchr(head, '\0', static_cast<std::size_t>(std::min<off_t>(info.st_size, 4))) == nullptr &&
         std::memcmp(head, "PK\3\4", 4) != 0 && head[2] != '\r';
}

Place place_of(const Options& options, const std::string& instance_dir) {
  Place place;
  add(place.key, "version", OVERMIND_VERSION);
  add(place.key, "boot", options.boot + " " + stamp_of(options.boot));
  add(place.key, "python", options.python + " " + stamp_of(options.python));
  add(place.key, "venv", stamp_of(options.python.substr(0, options.python.rfind('/')) + "/../pyvenv.cfg"));
  const std::string kind = kind_of(options);
  add(place.key, "kind", kind);
  add_environment(place.key);
  add_process(place.key);
  place.zygote = instance_dir + "/z" + hash_of(place.key);
  place.profile = instance_dir + "/p" + hash_of(options.python + '\0' + kind);
  return place;
}

std::string only_plain() {
  if (has_relative_path(std::getenv("PYTHONPATH"))) return "PYTHONPATH has a relative path";
  for (const char* name : {"PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC", "PYTHONVERBOSE",
                           "PYTHONDUMPREFS", "COVERAGE_PROCESS_START"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return std::string(name) + " is set";
  }
  for (int fd = 0; fd <= 2; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) return "descriptor " + std::to_string(fd) + " is closed";
  // A job in the background must be stopped by the terminal when it reads; a process of another session would not be.
  const pid_t foreground = ::tcgetpgrp(0);
  if (foreground > 0 && foreground != ::getpgrp()) return "it is a job in the background of a terminal";
  return {};
}

}  // namespace overmind::launcher
