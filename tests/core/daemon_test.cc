// SPDX-License-Identifier: MIT
// Life and death of overmindd: started, found, killed, stopped.
#include "core/daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>

#include "core/spawn.h"
#include "tests/core/daemon_fixture.h"

namespace overmind {
namespace {

using Kind = Lookup::Kind;
using testing::read_file;
using testing::wait_until;

class DaemonLifeTest : public testing::DaemonTest {
 protected:
  struct Outcome {
    int exit_code = -1;
    std::string text;  // stdout and stderr
  };
  // Runs overmindd to its end, with its output captured as a script's would be.
  Outcome run(std::vector<std::string> arguments) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    UniqueFd read_end(ends[0]), write_end(ends[1]);
    arguments.insert(arguments.begin(), OVERMINDD_PATH);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_t pid = ::fork();
    if (pid == 0) {
      ::dup2(write_end.get(), 1);
      ::dup2(write_end.get(), 2);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    write_end.reset();
    Outcome outcome;
    // Ends only when every holder of the pipe is gone: a daemon that kept it would be waited for.
    while (wait_for(read_end.get(), POLLIN, deadline_in(20)).ok()) {
      char part[512];
      ssize_t got = ::read(read_end.get(), part, sizeof(part));
      if (got <= 0) {
        int status = 0;
        ::waitpid(pid, &status, 0);
        outcome.exit_code = WEXITSTATUS(status);
        return outcome;
      }
      outcome.text.append(part, static_cast<std::size_t>(got));
    }
    ADD_FAILURE() << "the output is still held open";
    return outcome;
  }
  std::vector<std::string> by_hand() { return daemon_arguments(config_); }

  // Starts the daemon from a process that may have so many files open.
  void start_limited(rlim_t soft, rlim_t hard) {
    testing::Child starter([&] {
      const rlimit files{soft, hard};
      return ::setrlimit(RLIMIT_NOFILE, &files) == 0 && Client(config_).connect(true).ok();
    });
    ASSERT_TRUE(starter.join());
  }

  void expect_entries_survive(Client& client, EntryId id) {
    Lookup hit = look(client, key(1));
    ASSERT_EQ(hit.kind, Kind::kHit);
    EXPECT_EQ(hit.mapping->manifest().id, id);
  }
};

TEST_F(DaemonLifeTest, VersionAndUsage) {
  Outcome version = run({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.text, "overmindd " OVERMIND_VERSION "\n");
  EXPECT_EQ(run({"--help"}).exit_code, 0);
  for (const char* wrong : {"--what", "--idle-exit=soon", "--idle-exit=-1", "extra", "--ready-fd=1"}) {
    EXPECT_EQ(run({wrong}).exit_code, static_cast<int>(DaemonExit::kUsage)) << wrong;
  }
}

TEST_F(DaemonLifeTest, StartedByHandItDetachesAndSaysSo) {
  Outcome first = run(by_hand());
  EXPECT_EQ(first.exit_code, 0);
  EXPECT_EQ(first.text, "ok\n");
  Outcome second = run(by_hand());
  EXPECT_EQ(second.exit_code, static_cast<int>(DaemonExit::kAlreadyRunning));
  EXPECT_EQ(second.text, "already-running\n");
  connected(false);
}

TEST_F(DaemonLifeTest, ItHoldsNothingOfItsStarter) {
  UniqueFd open_here(::open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY));  // inheritable on purpose
  auto client = connected();
  pid_t server = server_pid(*client);
  for (pid_t pid : {server, keeper_pid(server)}) {
    std::string process = "/proc/" + std::to_string(pid);
    EXPECT_EQ(std::filesystem::read_symlink(process + "/cwd"), "/");
    EXPECT_NE(::getsid(pid), ::getsid(0));
    for (const auto& entry : std::filesystem::directory_iterator(process + "/fd")) {
      std::error_code gone;
      std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
      EXPECT_NE(target, folder_.path()) << entry.path();
      EXPECT_EQ(target.find("/dev/pts"), std::string::npos) << entry.path();
    }
  }
}

TEST_F(DaemonLifeTest, NoChildIsLeftToTheStarter) {
  connected();
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST_F(DaemonLifeTest, AKilledServerLosesNothing) {
  auto client = connected();
  EntryId id = put(*client, key(1), 1 << 20);
  ASSERT_OK(client->pin(id, true));
  Lookup mapped = look(*client, key(1));
  client->used(id);
  ::kill(server_pid(*client), SIGKILL);
  ASSERT_NO_FATAL_FAILURE(expect_entries_survive(*client, id));  // this very client, without a word about it
  EXPECT_TRUE(client->list().value()[0].pinned);
  EXPECT_EQ(client->list().value()[0].mapped_by, 1u);
  EXPECT_EQ(client->list().value()[0].hits, 1u);
}

TEST_F(DaemonLifeTest, AKilledKeeperLosesNothing) {
  auto client = connected();
  EntryId id = put(*client, key(1), 1 << 20);
  pid_t server = server_pid(*client);
  pid_t keeper = keeper_pid(server);
  ::kill(keeper, SIGKILL);
  ASSERT_NO_FATAL_FAILURE(expect_entries_survive(*client, id));
  EXPECT_EQ(server_pid(*client), server);
  // The new keeper holds everything too: now the server may die.
  ASSERT_TRUE(wait_until([&] {
    std::vector<pid_t> now = testing::processes_with(folder_.path());
    return now.size() == 2 && std::ranges::find(now, keeper) == now.end();
  }));
  pid_t second = keeper_pid(server);
  ASSERT_TRUE(wait_until([&] {
    // Until it is its own program it is the server's image, with the server's descriptors.
    auto program = [](pid_t pid) { return testing::read_file("/proc/" + std::to_string(pid) + "/cmdline"); };
    if (program(second) == program(server)) return false;
    std::string descriptors;
    for (const auto& entry : testing::list_folder("/proc/" + std::to_string(second) + "/fd")) {
      std::error_code gone;
      descriptors += std::filesystem::read_symlink(entry, gone).string();
    }
    return descriptors.find("memfd:") != std::string::npos;
  }));
  ::kill(server, SIGKILL);
  expect_entries_survive(*client, id);
}

TEST_F(DaemonLifeTest, KilledAgainAndAgainItGivesUpAndTheNextStartWorks) {
  auto client = connected();
  put(*client, key(1));
  for (int i = 0; i < 8; ++i) {
    Client own(config_);
    if (!own.connect(false).ok()) break;
    Result<StoreStats> stats = own.stats();
    if (stats.ok()) ::kill(static_cast<pid_t>(stats.value().daemon_pid), SIGKILL);
  }
  ASSERT_TRUE(wait_until([&] { return testing::processes_with(folder_.path()).empty(); }));
  EXPECT_NE(read_file(config_.log_path()).find("giving up"), std::string::npos);
  EXPECT_EQ(look(*client, key(1)).kind, Kind::kLease);  // a new daemon, over the stale files of the dead one
}

TEST_F(DaemonLifeTest, BothKilledTheNextStartWorksOverTheirFiles) {
  auto client = connected();
  put(*client, key(1));
  pid_t server = server_pid(*client);
  pid_t keeper = keeper_pid(server);
  ::kill(keeper, SIGSTOP);  // or it would start a server before its own end
  ::kill(server, SIGKILL);
  ::kill(keeper, SIGKILL);
  ASSERT_TRUE(wait_until([&] { return testing::processes_with(folder_.path()).empty(); }));
  EXPECT_TRUE(std::filesystem::exists(config_.socket_path()));
  EXPECT_EQ(look(*client, key(1)).kind, Kind::kLease);
}

TEST_F(DaemonLifeTest, SigtermStopsBoth) {
  auto client = connected();
  pid_t server = server_pid(*client);
  ::kill(keeper_pid(server), SIGTERM);
  EXPECT_TRUE(wait_until([&] { return testing::processes_with(folder_.path()).empty(); }));
  EXPECT_FALSE(std::filesystem::exists(config_.socket_path()));
}

TEST_F(DaemonLifeTest, ItTakesAllTheOpenFilesThatItMayHave) {
  ASSERT_NO_FATAL_FAILURE(start_limited(64, 256));
  auto client = connected(false);
  pid_t server = server_pid(*client);
  for (pid_t pid : {server, keeper_pid(server)}) {
    rlimit files{};
    ASSERT_EQ(::prlimit(pid, RLIMIT_NOFILE, nullptr, &files), 0);
    EXPECT_EQ(files.rlim_cur, 256u);
  }
  for (std::uint8_t i = 1; i <= 64; ++i) ASSERT_NE(put(*client, key(i)), 0u);
  EXPECT_EQ(client->list().value().size(), 64u);
}

TEST_F(DaemonLifeTest, WithoutDescriptorsTheOldestEntryGoesAndPeopleAreTold) {
  const std::string reason = "the daemon's limit of 64 open files leaves room for 20 entries";
  config_.log_level = "warning";
  ASSERT_NO_FATAL_FAILURE(start_limited(64, 64));
  auto client = connected(false);
  for (std::uint8_t i = 1; i <= 20; ++i) ASSERT_NE(put(*client, key(i)), 0u);
  EXPECT_EQ(read_file(config_.log_path()).find(reason), std::string::npos);
  for (std::uint8_t i = 21; i <= 30; ++i) ASSERT_NE(put(*client, key(i)), 0u);
  EXPECT_EQ(client->list().value().size(), 20u);
  EXPECT_EQ(look(*client, key(10), /*lease=*/false).kind, Kind::kAbsent);
  EXPECT_EQ(look(*client, key(11), /*lease=*/false).kind, Kind::kHit);
  std::string log = read_file(config_.log_path());
  ASSERT_NE(log.find(reason), std::string::npos) << log;
  EXPECT_EQ(log.find(reason), log.rfind(reason)) << "said once";

  std::vector<EntryInfo> entries = client->list().value();
  for (const EntryInfo& entry : entries) ASSERT_OK(client->pin(entry.id, true));
  auto refused = publish(*client, look(*client, key(40)).lease);
  EXPECT_EQ(refused.status().code(), Code::kExhausted);
  EXPECT_NE(refused.status().message().find(reason), std::string::npos) << refused.status().to_string();
  EXPECT_EQ(client->list().value().size(), 20u);
}

TEST_F(DaemonLifeTest, WithNoDescriptorAtAllASnapshotIsRefusedWithTheReason) {
  ASSERT_NO_FATAL_FAILURE(start_limited(26, 26));
  auto client = connected(false);
  std::vector<UniqueFd> idle;  // each takes one descriptor of the daemon's
  Status status;
  for (std::uint8_t i = 1; i <= 6 && status.ok(); ++i) {
    status = publish(*client, look(*client, key(i)).lease).status();
    idle.push_back(connect_to(config_.socket_path(), deadline_in(5)).value());
  }
  EXPECT_EQ(status.code(), Code::kExhausted) << status.to_string();
  EXPECT_NE(status.message().find("no descriptor is free: the daemon's limit of 26 open files"), std::string::npos)
      << status.to_string();
}

TEST_F(DaemonLifeTest, NotebookSignalsDoNotReachIt) {
  auto client = connected();
  pid_t server = server_pid(*client);
  for (int signal : {SIGINT, SIGHUP, SIGPIPE}) {
    ::kill(server, signal);
    ::kill(keeper_pid(server), signal);
  }
  EXPECT_EQ(server_pid(*client), server);
}

TEST_F(DaemonLifeTest, IdleItEndsByChoiceEvenWithEntries) {
  config_.idle_exit_seconds = 0.3;
  auto client = connected();
  put(*client, key(1));
  EXPECT_TRUE(client->stats().ok());
  client.reset();
  EXPECT_TRUE(wait_until([&] { return testing::processes_with(folder_.path()).empty(); }));
}

TEST_F(DaemonLifeTest, ItEndsWhenItsFolderIsDeleted) {
  auto client = connected();
  put(*client, key(1));
  // The daemon clears up as soon as it sees it: a file may be gone between being listed and being removed.
  std::error_code error;
  EXPECT_TRUE(wait_until([&] { return std::filesystem::remove_all(config_.runtime_dir, error) == 0 && !error; }, 10));
  EXPECT_TRUE(wait_until([&] { return testing::processes_with(folder_.path()).empty(); }, 10)) << "the daemon lives on";
  EXPECT_EQ(look(*client, key(1)).kind, Lookup::Kind::kLease) << "a new one is started, empty";
}

TEST_F(DaemonLifeTest, AFolderThatIsNotOursAloneIsDenied) {
  auto outcome = [&] { return Client(config_).connect(true); };
  std::string elsewhere = folder_ / "elsewhere";
  ASSERT_EQ(::mkdir(elsewhere.c_str(), 0700), 0);
  ASSERT_EQ(::symlink(elsewhere.c_str(), config_.runtime_dir.c_str()), 0);
  EXPECT_EQ(outcome().code(), Code::kDenied) << outcome().to_string();
  std::filesystem::remove(config_.runtime_dir);
  ASSERT_EQ(::mkdir(config_.runtime_dir.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(config_.runtime_dir.c_str(), 0777), 0);
  EXPECT_EQ(outcome().code(), Code::kDenied) << outcome().to_string();
  ASSERT_EQ(::chmod(config_.runtime_dir.c_str(), 0700), 0);
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(config_.runtime_dir.c_str(), 12345, 12345), 0);
    EXPECT_EQ(outcome().code(), Code::kDenied) << outcome().to_string();
    ASSERT_EQ(::chown(config_.runtime_dir.c_str(), 0, 0), 0);
  }
  EXPECT_TRUE(testing::processes_with(folder_.path()).empty());
}

TEST_F(DaemonLifeTest, ASymlinkInPlaceOfTheLockIsDenied) {
  ASSERT_OK(ensure_private_dir(config_.runtime_dir));
  ASSERT_OK(ensure_private_dir(config_.instance_dir()));
  std::string victim = folder_ / "victim";
  UniqueFd(::open(victim.c_str(), O_WRONLY | O_CREAT, 0600));
  ASSERT_EQ(::symlink(victim.c_str(), config_.lock_path().c_str()), 0);
  Client client(config_);
  Status status = client.connect(true);
  EXPECT_EQ(status.code(), Code::kDenied) << status.to_string();
  EXPECT_NE(status.message().find("symlink"), std::string::npos) << status.to_string();
}

TEST_F(DaemonLifeTest, ADaemonThatCannotStartSaysWhy) {
  Config wrong = config_;
  wrong.budget = "a lot";
  Client client(wrong);
  Status status = client.connect(true);
  EXPECT_EQ(status.code(), Code::kInvalid) << status.to_string();
  EXPECT_NE(status.message().find("a lot"), std::string::npos) << status.to_string();
  wrong = config_;
  wrong.daemon_path = folder_ / "nothing";
  EXPECT_EQ(Client(wrong).connect(true).code(), Code::kUnavailable);
  wrong.daemon_path = "/bin/false";
  EXPECT_EQ(Client(wrong).connect(true).code(), Code::kUnavailable);
}

TEST_F(DaemonLifeTest, ALongFolderSaysWhatToDo) {
  config_.runtime_dir = folder_ / std::string(100, 'l');
  Client client(config_);
  Status status = client.connect(true);
  EXPECT_NE(status.message().find("OVERMIND_RUNTIME_DIR"), std::string::npos) << status.to_string();
  config_.runtime_dir = folder_ / "run";
}

TEST_F(DaemonLifeTest, AStuckDaemonEndsInATimeout) {
  auto client = connected();
  pid_t server = server_pid(*client);
  ::kill(server, SIGSTOP);
  auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(client->stats().status().code(), Code::kTimeout);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
  ::kill(server, SIGCONT);
  EXPECT_TRUE(client->stats().ok());
}

TEST(StartReportTest, GoesThroughALine) {
  using Outcome = StartReport::Outcome;
  EXPECT_EQ(StartReport::from_line(StartReport{Outcome::kOk, {}}.to_line()).outcome, Outcome::kOk);
  EXPECT_EQ(StartReport::from_line("already-running\n").outcome, Outcome::kAlreadyRunning);
  StartReport failed = StartReport::from_line(StartReport{Outcome::kFailed, {Code::kDenied, "two\nlines"}}.to_line());
  EXPECT_EQ(failed.outcome, Outcome::kFailed);
  EXPECT_EQ(failed.failure.code(), Code::kDenied);
  EXPECT_EQ(failed.failure.message(), "two lines");
  for (const char* text : {"", "\n", "failed", "failed ", "segmentation fault"}) {
    EXPECT_EQ(StartReport::from_line(text).outcome, Outcome::kFailed) << text;
    EXPECT_FALSE(StartReport::from_line(text).failure.ok()) << text;
  }
}

}  // namespace
}  // namespace overmind
