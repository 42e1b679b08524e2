// SPDX-License-Identifier: MIT
#include "core/config.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "core/unique_fd.h"

namespace overmind {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// ---- environment -----------------------------------------------------------------------------

// Empty when unset: both mean the default.
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

Status wrong_variable(const char* name, const std::string& value, std::string_view form) {
  return Status(Code::kInvalid, std::string(name) + "='" + value + "': expected " + std::string(form));
}

// O_NOFOLLOW looks only at the last component, and after a slash there is none left.
std::string without_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// After `su` the variable may still name another user's folder; in containers often one that is not there.
bool is_own_folder(const std::string& path) {
  struct stat info {};
  return path.starts_with('/') && ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
         info.st_uid == ::geteuid();
}

std::string default_runtime_dir() {
  const std::string xdg = without_trailing_slashes(variable("XDG_RUNTIME_DIR"));
  if (is_own_folder(xdg)) return xdg + "/overmind";
  return "/tmp/overmind-" + std::to_string(::geteuid());
}

// ---- budget ----------------------------------------------------------------------------------

// Bytes of one unit, 0 when unknown; case does not matter. K, M, G, T alone are binary, as systemd has it.
double unit_bytes(std::string unit) {
  for (char& letter : unit) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  if (unit.empty() || unit == "b") return 1;
  const std::size_t power = std::string_view("kmgt").find(unit[0]);
  if (power == std::string_view::npos) return 0;
  const std::string rest = unit.substr(1);
  if (rest == "b") return std::pow(1000.0, power + 1);
  if (rest.empty() || rest == "ib") return std::pow(1024.0, power + 1);
  return 0;
}

// ---- memory ----------------------------------------------------------------------------------

// A decimal number at the start of the file; nullopt when there is none ("max") or no file.
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

// The number after `name` in a file of "name value" lines (memory.stat, meminfo).
std::optional<std::uint64_t> read_field(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    std::uint64_t value = 0;
    if (words >> word && word == name && words >> value) return value;
  }
  return std::nullopt;
}

// File names of one cgroup version.
struct CgroupFiles {
  std::vector<const char*> limits;
  const char* usage;
  const char* inactive_file;  // fields of memory.stat, children included
  const char* active_file;
};
const CgroupFiles kVersion2 = {{"/memory.max", "/memory.high"}, "/memory.current", "inactive_file", "active_file"};
const CgroupFiles kVersion1 = {
    {"/memory.limit_in_bytes"}, "/memory.usage_in_bytes", "total_inactive_file", "total_active_file"};

// What one cgroup can still give. The file lists hold what the page cache can drop; shared memory, so
// every segment of ours, is on the anonymous lists and rightly counts as used.
std::uint64_t left_in(const std::string& folder, const CgroupFiles& files) {
  std::uint64_t limit = kUnlimited;
  for (const char* name : files.limits) limit = std::min(limit, read_number(folder + name).value_or(kUnlimited));
  const std::optional<std::uint64_t> usage = read_number(folder + files.usage);
  if (!usage || limit >= kUnlimited / 4) return kUnlimited;  // version 1 writes about 2^63 for "no limit"
  const std::string stat = folder + "/memory.stat";
  const std::uint64_t reclaimable =
      read_field(stat, files.inactive_file).value_or(0) + read_field(stat, files.active_file).value_or(0);
  const std::uint64_t kept = *usage - std::min(*usage, reclaimable);
  return limit - std::min(limit, kept);
}

// Where the memory controller of one version is mounted, and which cgroup is mounted there (not "/" in a
// container that shares the host's cgroup namespace).
struct CgroupMount {
  std::string root;
  std::string point;
};

bool has_word(const std::string& list, std::string_view word) {
  std::istringstream words(list);
  for (std::string each; std::getline(words, each, ',');) {
    if (each == word) return true;
  }
  return false;
}

// mountinfo: "36 35 98:0 ROOT POINT options [optional ...] - TYPE SOURCE SUPER_OPTIONS"
std::optional<CgroupMount> find_mount(const std::string& prefix, bool version2) {
  std::ifstream file(prefix + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line.substr(0, dash)), right(line.substr(dash + 3));
    std::string skip, type, source, options;
    CgroupMount mount;
    left >> skip >> skip >> skip >> mount.root >> mount.point;
    right >> type >> source >> options;
    if (version2 ? type == "cgroup2" : type == "cgroup" && has_word(options, "memory")) return mount;
  }
  return std::nullopt;
}

// The path of this process's cgroup. /proc/self/cgroup: "0::/path" (version 2) or "4:cpu,memory:/path".
std::optional<std::string> own_cgroup(const std::string& prefix, bool version2) {
  std::ifstream file(prefix + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version2 ? line.starts_with("0::") : has_word(controllers, "memory")) return line.substr(second + 1);
  }
  return std::nullopt;
}

// `path` as seen below the mount; empty (the mount itself) when it is not below.
std::string below(const std::string& path, const std::string& root) {
  if (path.find("/..") != std::string::npos) return "";  // outside of the cgroup namespace
  if (root == "/") return path == "/" ? "" : path;
  if (!path.starts_with(root) || (path.size() > root.size() && path[root.size()] != '/')) return "";
  return path.substr(root.size());
}

// The least that any cgroup from ours up to the mount can still give: each may limit.
std::uint64_t left_in_cgroups(const std::string& prefix, bool version2) {
  const std::optional<CgroupMount> mount = find_mount(prefix, version2);
  const std::optional<std::string> path = own_cgroup(prefix, version2);
  if (!mount || !path) return kUnlimited;
  const std::string top = prefix + mount->point;
  std::string folder = top + below(*path, mount->root);
  std::uint64_t left = kUnlimited;
  for (;;) {
    left = std::min(left, left_in(folder, version2 ? kVersion2 : kVersion1));
    if (folder.size() <= top.size()) return left;
    folder.resize(folder.rfind('/'));
  }
}

std::uint64_t left_on_machine(const std::string& prefix) {
  if (const auto available = read_field(prefix + "/proc/meminfo", "MemAvailable:")) return *available * 1024;
  const long pages = ::sysconf(_SC_AVPHYS_PAGES);
  return pages < 0 ? 0 : static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

std::string Config::instance_dir() const {
  return runtime_dir + "/v" OVERMIND_VERSION "-p" + std::to_string(kProtocolVersion);
}
std::string Config::socket_path() const { return instance_dir() + "/socket"; }
std::string Config::events_path() const { return instance_dir() + "/events"; }
std::string Config::lock_path() const { return instance_dir() + "/lock"; }
std::string Config::start_lock_path() const { return instance_dir() + "/start.lock"; }
std::string Config::log_path() const { return instance_dir() + "/log"; }
std::string Config::launcher_log_path() const { return instance_dir() + "/launcher.log"; }

Result<Config> Config::from_environment() {
  Config config;
  const std::string disable = variable("OVERMIND_DISABLE");
  if (!disable.empty() && disable != "0" && disable != "1") {
    return wrong_variable("OVERMIND_DISABLE", disable, "1 (off) or 0");
  }
  config.disabled = disable == "1";
  const std::string zygote = variable("OVERMIND_ZYGOTE");
  if (!zygote.empty() && zygote != "0" && zygote != "1") {
    return wrong_variable("OVERMIND_ZYGOTE", zygote, "0 (every start is a plain one) or 1");
  }
  config.zygote = zygote != "0";

  const std::string folder = variable("OVERMIND_RUNTIME_DIR");
  // The daemon has another working folder, so a relative path would name two places.
  if (!folder.empty() && folder[0] != '/') {
    return wrong_variable("OVERMIND_RUNTIME_DIR", folder, "an absolute path");
  }
  config.runtime_dir = folder.empty() ? default_runtime_dir() : without_trailing_slashes(folder);
  const std::size_t longest = std::max(config.socket_path().size(), config.events_path().size());
  if (constexpr std::size_t most = sizeof(sockaddr_un::sun_path) - 1; longest > most) {
    const std::size_t room = most - (longest - config.runtime_dir.size());
    return wrong_variable(folder.empty() ? "XDG_RUNTIME_DIR" : "OVERMIND_RUNTIME_DIR", config.runtime_dir,
                          "at most " + std::to_string(room) + " characters (a unix socket is in it)");
  }

  if (const std::string budget = variable("OVERMIND_BUDGET"); !budget.empty()) {
    if (Result<std::uint64_t> bytes = parse_budget(budget, 0); !bytes.ok()) {
      return Status(Code::kInvalid, "OVERMIND_BUDGET: " + bytes.status().message());
    }
    config.budget = budget;
  }
  if (const std::string level = variable("OVERMIND_LOG"); !level.empty()) {
    if (level != "debug" && level != "info" && level != "warning" && level != "error") {
      return wrong_variable("OVERMIND_LOG", level, "debug, info, warning or error");
    }
    config.log_level = level;
  }
  return config;
}

bool is_own_free_variable(std::string_view name) { return name == "OVERMIND_BUDGET" || name == "OVERMIND_LOG"; }

Result<std::uint64_t> parse_budget(const std::string& text, std::uint64_t available) {
  const Status wrong(Code::kInvalid,
                     "'" + text + "': expected bytes (1000000), a size (16GiB, 512MB) or a share (50%)");
  // from_chars and not strtod: the decimal point must not depend on the user's locale.
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc() || text[0] < '0' || text[0] > '9') return wrong;  // no sign, no "inf"
  std::string unit(rest, end);
  if (unit.starts_with(' ')) unit.erase(0, 1);
  if (unit == "%") {
    if (number > 100) return wrong;
    return static_cast<std::uint64_t>(static_cast<double>(available) * (number / 100));
  }
  const double bytes = number * unit_bytes(unit);
  if (unit_bytes(unit) == 0 || bytes >= 0x1p63) return wrong;
  if (unit_bytes(unit) == 1 && bytes != std::floor(bytes)) return wrong;  // 0.5: a share was meant, or a unit forgotten
  return static_cast<std::uint64_t>(bytes);
}

std::uint64_t available_memory(const std::string& prefix) {
  return std::min({left_in_cgroups(prefix, true), left_in_cgroups(prefix, false), left_on_machine(prefix)});
}

Status ensure_private_dir(const std::string& path) {
  const std::string folder = without_trailing_slashes(path);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return errno_status("creating " + folder);
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) {
    if (errno == ELOOP || errno == ENOTDIR) {
      return Status(Code::kDenied, folder + " is a symlink or not a folder; remove it or set OVERMIND_RUNTIME_DIR");
    }
    return errno_status("opening " + folder);
  }
  // Of the descriptor, not of the path: what was checked is what was opened.
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_status("fstat of " + folder);
  if (info.st_uid != ::geteuid()) {
    return Status(Code::kDenied, folder + " belongs to user " + std::to_string(info.st_uid) +
                                     "; remove it or set OVERMIND_RUNTIME_DIR");
  }
  if ((info.st_mode & 077) != 0) {
    return Status(Code::kDenied, folder + " is open to other users; run: chmod 700 " + folder);
  }
  return {};
}

}  // namespace overmind
