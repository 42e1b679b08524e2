// SPDX-License-Identifier: MIT
// What several tests of core share: a folder that goes away, a count of open descriptors, and a
// wait for a condition (tests never sleep for a fixed time).
#pragma once

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "core/status.h"

namespace overmind::testing {

// A fresh 0700 folder, removed with all that is in it. Symlinks inside are removed, not followed.
class TempDir {
 public:
  TempDir() {
    const char* base = ::getenv("TMPDIR");
    path_ = std::string(base != nullptr && *base != '\0' ? base : "/tmp") + "/overmind-test-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) ::abort();
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// What is in a folder; less or nothing when it goes away meanwhile, as those of processes do in /proc. Never throws.
inline std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) found.push_back(entry->path());
  return found;
}

// How many descriptors this process has open.
inline std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count - 1;  // the iterator's own
}

// The test fails (and shows the numbers) when its scope ends with more or fewer descriptors than it began with.
// `report(before, after)` is called only when they differ, e.g. a lambda with ADD_FAILURE().
template <typename Report>
class DescriptorGuard {
 public:
  explicit DescriptorGuard(Report report) : report_(report), before_(open_descriptors()) {}
  ~DescriptorGuard() {
    const std::size_t after = open_descriptors();
    if (after != before_) report_(before_, after);
  }
  DescriptorGuard(const DescriptorGuard&) = delete;
  DescriptorGuard& operator=(const DescriptorGuard&) = delete;

 private:
  Report report_;
  std::size_t before_;
};

// True as soon as `condition()` is; false when it is not within `seconds`. Looks every millisecond.
template <typename Condition>
bool wait_until(Condition condition, double seconds = 20) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    const timespec pause{0, 1'000'000};
    ::nanosleep(&pause, nullptr);
  }
  return true;
}

}  // namespace overmind::testing

// Ends the test with the message when a Status or Result is not ok.
#define ASSERT_OK(expression)                                                                 \
  do {                                                                                        \
    const ::overmind::Status overmind_ok_status = ::overmind::testing::status_of(expression); \
    ASSERT_TRUE(overmind_ok_status.ok()) << overmind_ok_status.to_string();                   \
  } while (false)

namespace overmind::testing {

inline const Status& status_of(const Status& status) { return status; }
template <typename T>
Status status_of(const Result<T>& result) {
  return result.status();
}

}  // namespace overmind::testing
