// SPDX-License-Identifier: MIT
#include "core/config.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "tests/core/testing.h"

namespace overmind {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kGiB = 1 << 30;

// Every variable that Config reads is unset during a test, and as before after it.
class FromEnvironment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"OVERMIND_DISABLE", "OVERMIND_RUNTIME_DIR", "OVERMIND_BUDGET", "OVERMIND_LOG", "XDG_RUNTIME_DIR"}) {
      const char* value = ::getenv(name);
      before_[name] = value != nullptr ? std::optional<std::string>(value) : std::nullopt;
      ::unsetenv(name);
    }
  }
  void TearDown() override {
    for (const auto& [name, value] : before_) {
      if (value) ::setenv(name.c_str(), value->c_str(), 1);
      if (!value) ::unsetenv(name.c_str());
    }
  }
  static void set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }
  static Config config() {
    Result<Config> config = Config::from_environment();
    EXPECT_TRUE(config.ok()) << config.status().to_string();
    return config.ok() ? config.value() : Config();
  }
  static void expect_refused(const char* name, const std::string& value) {
    set(name, value);
    const Status status = Config::from_environment().status();
    EXPECT_EQ(status.code(), Code::kInvalid) << name << "=" << value;
    EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
    ::unsetenv(name);
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

TEST_F(FromEnvironment, GivesDefaults) {
  const Config defaults = config();
  EXPECT_FALSE(defaults.disabled);
  EXPECT_EQ(defaults.budget, "50%");
  EXPECT_EQ(defaults.log_level, "warning");
  EXPECT_EQ(defaults.runtime_dir, "/tmp/overmind-" + std::to_string(::geteuid()));
}

TEST_F(FromEnvironment, EmptyIsUnset) {
  const Config defaults = config();
  for (const char* name : {"OVERMIND_DISABLE", "OVERMIND_RUNTIME_DIR", "OVERMIND_BUDGET", "OVERMIND_LOG"})
    set(name, "");
  EXPECT_EQ(config().runtime_dir, defaults.runtime_dir);
  EXPECT_EQ(config().budget, defaults.budget);
  EXPECT_EQ(config().log_level, defaults.log_level);
  EXPECT_FALSE(config().disabled);
}

TEST_F(FromEnvironment, TakesWhatIsSet) {
  set("OVERMIND_DISABLE", "1");
  set("OVERMIND_RUNTIME_DIR", "/run/mine///");
  set("OVERMIND_BUDGET", "16GiB");
  set("OVERMIND_LOG", "debug");
  EXPECT_TRUE(config().disabled);
  EXPECT_EQ(config().runtime_dir, "/run/mine");
  EXPECT_EQ(config().budget, "16GiB");
  EXPECT_EQ(config().log_level, "debug");
  set("OVERMIND_DISABLE", "0");
  EXPECT_FALSE(config().disabled);
}

TEST_F(FromEnvironment, UsesTheSessionsRuntimeFolder) {
  const testing::TempDir folder;
  set("XDG_RUNTIME_DIR", folder.path());
  EXPECT_EQ(config().runtime_dir, folder / "overmind");
  set("OVERMIND_RUNTIME_DIR", "/run/mine");
  EXPECT_EQ(config().runtime_dir, "/run/mine");
}

TEST_F(FromEnvironment, IgnoresARuntimeFolderThatIsNotOurs) {
  const testing::TempDir folder;
  const std::string fallback = config().runtime_dir;
  for (const std::string& path : {folder / "missing", std::string("relative"), std::string("/dev/null")}) {
    set("XDG_RUNTIME_DIR", path);
    EXPECT_EQ(config().runtime_dir, fallback) << path;
  }
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_EQ(::chown(folder.path().c_str(), 12345, 12345), 0);
  set("XDG_RUNTIME_DIR", folder.path());
  EXPECT_EQ(config().runtime_dir, fallback);
}

TEST_F(FromEnvironment, NamesTheWrongVariable) {
  expect_refused("OVERMIND_DISABLE", "yes");
  expect_refused("OVERMIND_RUNTIME_DIR", "relative/path");
  expect_refused("OVERMIND_RUNTIME_DIR", "/" + std::string(100, 'x'));
  expect_refused("OVERMIND_BUDGET", "lots");
  expect_refused("OVERMIND_LOG", "verbose");
}

TEST(ConfigPaths, AreInOneFolderPerVersion) {
  Config config;
  config.runtime_dir = "/run/x";
  EXPECT_EQ(config.instance_dir(), "/run/x/v" OVERMIND_VERSION "-p" + std::to_string(kProtocolVersion));
  std::map<std::string, int> paths;
  for (const std::string& path :
       {config.socket_path(), config.events_path(), config.lock_path(), config.start_lock_path(), config.log_path()}) {
    EXPECT_EQ(path.rfind(config.instance_dir() + "/", 0), 0u) << path;
    EXPECT_EQ(paths[path]++, 0) << path;
  }
}

TEST(ParseBudget, TakesBytesSizesAndShares) {
  const std::vector<std::pair<const char*, std::uint64_t>> cases = {
      {"0", 0},
      {"1000000", 1'000'000},
      {"512MB", 512'000'000},
      {"16GiB", 16 * kGiB},
      {"16gib", 16 * kGiB},
      {"16G", 16 * kGiB},
      {"1.5GiB", 3 * kGiB / 2},
      {"2 KiB", 2048},
      {"10B", 10},
      {"1TB", 1'000'000'000'000},
      {"50%", 4 * kGiB},
      {"100%", 8 * kGiB},
      {"12.5%", kGiB},
      {"0%", 0},
  };
  for (const auto& [text, bytes] : cases) {
    Result<std::uint64_t> parsed = parse_budget(text, 8 * kGiB);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(parsed.value(), bytes) << text;
  }
}

TEST(ParseBudget, RefusesAllElse) {
  for (const char* text : {"",           " ",   "%",   "GiB",    "-1",  "+1",     "-5%",   "101%",          "1e3",
                           "0x10",       "inf", "nan", "1,5GiB", "5%%", "16GiBs", "16 XB", "9999999999TiB", "1  GiB",
                           "50 % of it", "0.5", "1.5B"}) {
    EXPECT_EQ(parse_budget(text, kGiB).status().code(), Code::kInvalid) << text;
  }
}

// A tree of the files that available_memory() reads.
class AvailableMemory : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const std::string whole = root_.path() + path;
    std::filesystem::create_directories(std::filesystem::path(whole).parent_path());
    std::ofstream(whole) << text;
  }
  void machine(std::uint64_t bytes) {
    write("/proc/meminfo", "MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:  " + std::to_string(bytes / 1024) +
                               " kB\nBuffers: 1 kB\n");
  }
  void version2(const std::string& cgroup, const std::string& limit, std::uint64_t current, std::uint64_t files) {
    const std::string folder = "/sys/fs/cgroup" + cgroup;
    write(folder + "/memory.max", limit + "\n");
    write(folder + "/memory.current", std::to_string(current) + "\n");
    write(folder + "/memory.stat", "anon 1\nfile 999999999999\nshmem 77\ninactive_anon 88\ninactive_file " +
                                       std::to_string(files / 2) + "\nactive_file " + std::to_string(files / 2) + "\n");
  }
  void version1(const std::string& cgroup, const std::string& limit, std::uint64_t usage, std::uint64_t files) {
    const std::string folder = "/sys/fs/cgroup/memory" + cgroup;
    write(folder + "/memory.limit_in_bytes", limit + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
    write(folder + "/memory.stat", "cache 1\ninactive_file 1\nactive_file 1\ntotal_inactive_file " +
                                       std::to_string(files / 2) + "\ntotal_active_file " + std::to_string(files / 2) +
                                       "\n");
  }
  void in_version2(const std::string& cgroup, const std::string& mounted = "/") {
    write("/proc/self/cgroup", "0::" + cgroup + "\n");
    write("/proc/self/mountinfo", "22 1 0:20 / /proc rw shared:1 - proc proc rw\n30 22 0:26 " + mounted +
                                      " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void in_version1(const std::string& cgroup) {
    write("/proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:" + cgroup + "\n0::/\n");
    write("/proc/self/mountinfo",
          "35 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
          "36 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
          "41 31 0:41 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  }
  std::uint64_t available() const { return available_memory(root_.path()); }

  testing::TempDir root_;
};

TEST_F(AvailableMemory, IsTheMachinesWithoutCgroups) {
  machine(8 * kGiB);
  EXPECT_EQ(available(), 8 * kGiB);
}

TEST_F(AvailableMemory, HeedsItsCgroup) {
  machine(8 * kGiB);
  in_version2("/user/kernel");
  version2("/user/kernel", std::to_string(2 * kGiB), kGiB, 0);
  EXPECT_EQ(available(), kGiB);
}

TEST_F(AvailableMemory, CountsDroppablePageCacheButNotSharedMemory) {
  machine(8 * kGiB);
  in_version2("/user");
  version2("/user", std::to_string(2 * kGiB), kGiB, 256 * kMiB);
  EXPECT_EQ(available(), kGiB + 256 * kMiB);
}

TEST_F(AvailableMemory, HeedsEveryCgroupAbove) {
  machine(8 * kGiB);
  in_version2("/a/b/c");
  version2("/a/b/c", "max", kMiB, 0);
  version2("/a/b", std::to_string(4 * kGiB), kGiB, 0);
  version2("/a", std::to_string(3 * kGiB), 2 * kGiB, 0);
  EXPECT_EQ(available(), kGiB);
}

TEST_F(AvailableMemory, HeedsTheThrottleBeforeTheLimit) {
  machine(8 * kGiB);
  in_version2("/a");
  version2("/a", std::to_string(4 * kGiB), kGiB, 0);
  write("/sys/fs/cgroup/a/memory.high", std::to_string(2 * kGiB) + "\n");
  EXPECT_EQ(available(), kGiB);
}

TEST_F(AvailableMemory, IsNothingInAFullCgroup) {
  machine(8 * kGiB);
  in_version2("/a");
  version2("/a", std::to_string(kGiB), kGiB + kMiB, 0);
  EXPECT_EQ(available(), 0u);
}

TEST_F(AvailableMemory, IsTheMachinesWhenThatIsLess) {
  machine(kGiB);
  in_version2("/a");
  version2("/a", std::to_string(4 * kGiB), 0, 0);
  EXPECT_EQ(available(), kGiB);
}

TEST_F(AvailableMemory, FindsItsCgroupInAContainer) {
  machine(8 * kGiB);
  in_version2("/docker/123/inner", "/docker/123");
  version2("/inner", std::to_string(3 * kGiB), 0, 0);
  version2("", std::to_string(2 * kGiB), 0, 0);
  EXPECT_EQ(available(), 2 * kGiB);
  version2("/inner", std::to_string(kGiB), 0, 0);
  EXPECT_EQ(available(), kGiB);
  in_version2("/../elsewhere");
  EXPECT_EQ(available(), 2 * kGiB);
}

TEST_F(AvailableMemory, HeedsVersion1) {
  machine(8 * kGiB);
  in_version1("/jobs/7");
  version1("/jobs/7", std::to_string(3 * kGiB), kGiB, 512 * kMiB);
  version1("/jobs", "9223372036854771712", kGiB, 0);
  version1("", "9223372036854771712", kGiB, 0);
  EXPECT_EQ(available(), 2 * kGiB + 512 * kMiB);
  version1("/jobs", std::to_string(2 * kGiB), kGiB, 0);
  EXPECT_EQ(available(), kGiB);
}

TEST_F(AvailableMemory, OfThisMachineIsSensible) {
  const std::uint64_t bytes = available_memory();
  EXPECT_GT(bytes, kMiB);
  EXPECT_LE(bytes, static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * 4096);
}

unsigned mode_of(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

TEST(EnsurePrivateDir, MakesItAndTakesItAgain) {
  const testing::TempDir base;
  const testing::DescriptorGuard guard([](auto before, auto after) { ADD_FAILURE() << before << " -> " << after; });
  ASSERT_OK(ensure_private_dir(base / "run"));
  EXPECT_EQ(mode_of(base / "run"), 0700u);
  ASSERT_OK(ensure_private_dir(base / "run"));
  ASSERT_OK(ensure_private_dir(base / "run/"));
}

TEST(EnsurePrivateDir, MakesNoParents) {
  const testing::TempDir base;
  EXPECT_EQ(ensure_private_dir(base / "a/b").code(), Code::kIo);
}

TEST(EnsurePrivateDir, RefusesASymlink) {
  const testing::TempDir base;
  ASSERT_OK(ensure_private_dir(base / "real"));
  std::filesystem::create_symlink(base / "real", base / "link");
  EXPECT_EQ(ensure_private_dir(base / "link").code(), Code::kDenied);
  EXPECT_EQ(ensure_private_dir(base / "link/").code(), Code::kDenied);
  std::filesystem::create_symlink(base / "nowhere", base / "dangling");
  EXPECT_EQ(ensure_private_dir(base / "dangling").code(), Code::kDenied);
}

TEST(EnsurePrivateDir, RefusesAFile) {
  const testing::TempDir base;
  std::ofstream(base / "file") << "x";
  EXPECT_EQ(ensure_private_dir(base / "file").code(), Code::kDenied);
}

TEST(EnsurePrivateDir, RefusesAFolderOpenToOthers) {
  const testing::TempDir base;
  for (const mode_t mode : {0755, 0701, 0770, 01777}) {
    ASSERT_OK(ensure_private_dir(base / "run"));
    ASSERT_EQ(::chmod((base / "run").c_str(), mode), 0);
    const Status status = ensure_private_dir(base / "run");
    EXPECT_EQ(status.code(), Code::kDenied);
    EXPECT_NE(status.message().find("chmod 700"), std::string::npos) << status.message();
    ASSERT_EQ(::chmod((base / "run").c_str(), 0700), 0);
  }
}

TEST(EnsurePrivateDir, RefusesAForeignOwner) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  const testing::TempDir base;
  ASSERT_OK(ensure_private_dir(base / "run"));
  ASSERT_EQ(::chown((base / "run").c_str(), 12345, 12345), 0);
  EXPECT_EQ(ensure_private_dir(base / "run").code(), Code::kDenied);
}

}  // namespace
}  // namespace overmind
