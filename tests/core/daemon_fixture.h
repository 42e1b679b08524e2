// SPDX-License-Identifier: MIT
// A daemon of one test: own folder, really started, really stopped, nothing left behind.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/client.h"
#include "core/unix_socket.h"
#include "tests/core/testing.h"

namespace overmind::testing {

// What could be read: nothing of a file that is not there, less of a process's file when it ends meanwhile.
inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  char part[4096];
  do {
    file.read(part, sizeof(part));  // unlike an iterator over its buffer, never throws
    text.append(part, static_cast<std::size_t>(file.gcount()));
  } while (file);
  return text;
}

// Processes whose command line names `word`, without this one; zombies have none.
inline std::vector<pid_t> processes_with(const std::string& word) {
  std::vector<pid_t> found;
  for (const auto& entry : list_folder("/proc")) {
    pid_t pid = std::atoi(entry.filename().c_str());
    if (pid <= 0 || pid == ::getpid()) continue;
    if (read_file(entry / "cmdline").find(word) != std::string::npos) found.push_back(pid);
  }
  return found;
}

// Runs `body` in a forked process; true when it returned true. The child never runs the test's own end.
class Child {
 public:
  explicit Child(const std::function<bool()>& body) : pid_(::fork()) {
    if (pid_ == 0) ::_exit(body() ? 0 : 1);
  }
  ~Child() {
    if (pid_ > 0) kill();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  bool join() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    join();
  }

 private:
  pid_t pid_;
};

class DaemonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_.runtime_dir = folder_ / "run";
    config_.budget = "256MiB";
    config_.log_level = "debug";
    config_.daemon_path = OVERMINDD_PATH;
  }

  void TearDown() override {
    if (HasFailure()) std::fprintf(stderr, "--- daemon log\n%s---\n", read_file(config_.log_path()).c_str());
    Client last(config_);
    Status stopped = last.stop();
    EXPECT_TRUE(stopped.ok() || stopped.code() == Code::kDenied) << stopped.to_string();
    EXPECT_TRUE(wait_until([&] { return processes_with(folder_.path()).empty(); }, 5)) << "processes are left";
    for (pid_t pid : processes_with(folder_.path())) ::kill(pid, SIGKILL);
#ifndef __SANITIZE_THREAD__  // libzmq is not instrumented
    std::string log = read_file(config_.log_path());
    EXPECT_EQ(log.find("Sanitizer"), std::string::npos) << log;  // the daemon's stderr goes there
    EXPECT_EQ(log.find("runtime error"), std::string::npos) << log;
#endif
  }

  std::unique_ptr<Client> connected(bool start = true) {
    auto client = std::make_unique<Client>(config_);
    Status status = client->connect(start);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return client;
  }

  static Key key(std::uint8_t number) {
    Key key{};
    key[0] = number;
    key[31] = 7;
    return key;
  }

  static Lookup look(Client& client, const Key& key, bool lease = true, double wait = 0) {
    Result<Lookup> lookup = client.lookup(key, lease, wait);
    EXPECT_TRUE(lookup.ok()) << lookup.status().to_string();
    return lookup.ok() ? std::move(lookup).value() : Lookup{};
  }

  // Publishes `size` bytes of `fill` under a lease.
  static Result<std::unique_ptr<Publication>> publish(Client& client, const Lease& lease, std::size_t size = 100,
                                                      std::uint64_t inline_limit = 1 << 30, char fill = 'x') {
    std::vector<char> bytes(size, fill);
    Source source{bytes.data(), bytes.size()};
    Manifest draft;
    draft.loader = "test.load";
    draft.target = "/models/one";
    draft.native_ns = 1'500'000'000;
    return client.publish(lease, draft, as_bytes("meta"), as_bytes("skeleton"), {}, {&source, 1}, inline_limit);
  }

  // Lease, publish, commit. Gives the entry's id, 0 when that failed.
  static EntryId put(Client& client, const Key& key, std::size_t size = 100) {
    Lookup miss = look(client, key);
    EXPECT_EQ(miss.kind, Lookup::Kind::kLease);
    auto published = publish(client, miss.lease, size);
    EXPECT_TRUE(published.ok()) << published.status().to_string();
    return published.ok() ? published.value()->id() : 0;
  }

  static std::span<const std::byte> as_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

  pid_t server_pid(Client& client) {
    Result<StoreStats> stats = client.stats();
    EXPECT_TRUE(stats.ok()) << stats.status().to_string();
    return stats.ok() ? static_cast<pid_t>(stats.value().daemon_pid) : -1;
  }

  // The daemon's other process.
  pid_t keeper_pid(pid_t server) {
    pid_t keeper = -1;
    wait_until([&] {
      for (pid_t pid : processes_with(folder_.path())) {
        if (pid != server) keeper = pid;
      }
      return keeper > 0;
    });
    return keeper;
  }

  TempDir folder_;
  Config config_;
};

}  // namespace overmind::testing
