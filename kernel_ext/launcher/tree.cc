// SPDX-License-Identifier: MIT
#include "kernel_ext/launcher/tree.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <system_error>

namespace overmind::launcher {
namespace {

// 0 if it is gone. The name before it in `stat` may hold anything, brackets too.
pid_t parent_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t at = text.rfind(") ");
  pid_t parent = 0;
  if (at != std::string::npos && at + 4 < text.size())
    std::from_chars(text.data() + at + 4, text.data() + text.size(), parent);
  return parent;
}

}  // namespace

std::vector<pid_t> descendants_of(pid_t pid) {
  std::multimap<pid_t, pid_t> children;
  std::error_code ignored;
  const std::filesystem::directory_iterator end;
  for (std::filesystem::directory_iterator entry("/proc", ignored); entry != end; entry.increment(ignored)) {
    const std::string name = entry->path().filename();
    pid_t number = 0;
    std::from_chars(name.data(), name.data() + name.size(), number);
    if (number > 0) children.emplace(parent_of(name), number);
  }
  std::vector<pid_t> found{pid};
  for (std::size_t at = 0; at < found.size(); ++at) {
    const auto [first, last] = children.equal_range(found[at]);
    for (auto each = first; each != last; ++each) found.push_back(each->second);
  }
  found.erase(found.begin());
  return found;
}

}  // namespace overmind::launcher
