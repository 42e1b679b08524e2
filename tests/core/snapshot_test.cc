// SPDX-License-Identifier: MIT
// Real processes throughout. The end of a status pipe tells when a child is done; /proc tells what it is.
#include "core/snapshot.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "tests/core/testing.h"

namespace overmind {
namespace {

using testing::wait_until;

// Upper bound of every wait: a child of idle priority may wait long for a processor on a busy machine.
constexpr double kPatience = 120;
constexpr char kFrame[] = "commit, please";

// Anonymous memory that the test may change, unmap or forbid to read while a child copies it.
class Memory {
 public:
  explicit Memory(std::size_t size, unsigned char fill = 0x5A) : size_(size) {
    data_ =
        static_cast<unsigned char*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (data_ == MAP_FAILED) ::abort();
    std::memset(data_, fill, size);
  }
  ~Memory() { ::munmap(data_, size_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  unsigned char* data() const { return data_; }
  std::size_t size() const { return size_; }
  Source source() const { return {data_, size_}; }

 private:
  unsigned char* data_;
  std::size_t size_;
};

// Everything that a snapshot of `sources` needs, the daemon's end of the socket included.
struct Rig {
  explicit Rig(std::vector<Source> from) : sources(std::move(from)) {
    std::vector<std::uint64_t> sizes;
    for (const Source& source : sources) sizes.push_back(source.size);
    Manifest draft;
    draft.loader = "loader";
    draft.id = 7;
    plan = plan_segment(draft, std::as_bytes(std::span("meta")), {}, {}, sizes).value();
    segment = create_segment("overmind:test", plan.total_size).value();
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) ::abort();
    child_end.reset(ends[0]);
    daemon_end.reset(ends[1]);
  }

  Result<UniqueFd> fork() {
    const SnapshotJob job{segment.get(), &plan, sources, child_end.get(), std::as_bytes(std::span(kFrame))};
    Result<UniqueFd> pipe = fork_snapshot(job);
    child_end.reset();
    return pipe;
  }

  // As the daemon: true when the commit frame arrived; answers it.
  bool acknowledge() const {
    char frame[64];
    const ssize_t size = ::recv(daemon_end.get(), frame, sizeof frame, 0);
    if (size != sizeof kFrame || std::memcmp(frame, kFrame, sizeof kFrame) != 0) return false;
    return ::send(daemon_end.get(), "\xA1 ok", 4, MSG_NOSIGNAL) == 4;
  }

  std::vector<Source> sources;
  SegmentPlan plan;
  UniqueFd segment, child_end, daemon_end;
};

bool readable(int fd, double seconds) {
  pollfd poll{fd, POLLIN, 0};
  return ::poll(&poll, 1, static_cast<int>(seconds * 1000)) == 1;
}

// nullopt: the child ended without a report, or is late.
std::optional<SnapshotStatus> report_of(int pipe) {
  SnapshotStatus report;
  if (!readable(pipe, kPatience) || ::read(pipe, &report, sizeof report) != sizeof report) return std::nullopt;
  return report;
}

// Other processes that hold the segment. Not found by name: other tests may run snapshots at the same time.
std::vector<pid_t> snapshot_children(int segment) {
  struct stat wanted {};
  if (::fstat(segment, &wanted) != 0) return {};
  std::vector<pid_t> found;
  for (const auto& process : testing::list_folder("/proc")) {
    const std::string name = process.filename();
    if (name.find_first_not_of("0123456789") != std::string::npos || std::stoi(name) == ::getpid()) continue;
    for (const auto& fd : testing::list_folder(process / "fd")) {
      struct stat held {};
      if (::stat(fd.c_str(), &held) == 0 && held.st_dev == wanted.st_dev && held.st_ino == wanted.st_ino) {
        found.push_back(std::stoi(name));
        break;
      }
    }
  }
  return found;
}

std::string line_of(pid_t pid, const std::string& file, const std::string& field) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/" + file);
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) return line.substr(line.find_first_not_of(" \t", field.size()));
  }
  return "";
}

// A child that has written its segment and waits for an answer: it stays as long as a test needs.
class WaitingChild {
 public:
  WaitingChild() : memory_(1 << 20), rig_({memory_.source()}) {
    Result<UniqueFd> pipe = rig_.fork();
    EXPECT_TRUE(pipe.ok()) << pipe.status().to_string();
    if (pipe.ok()) pipe_ = std::move(pipe).value();
    EXPECT_TRUE(readable(rig_.daemon_end.get(), kPatience)) << "no commit frame";
    const std::vector<pid_t> children = snapshot_children(rig_.segment.get());
    EXPECT_EQ(children.size(), 1u);
    pid_ = children.empty() ? -1 : children[0];
  }
  ~WaitingChild() {
    EXPECT_TRUE(rig_.acknowledge());
    const std::optional<SnapshotStatus> report = report_of(pipe_.get());
    EXPECT_TRUE(report && report->error == 0);
    EXPECT_TRUE(
        wait_until([&] { return ::kill(pid_, 0) != 0 || line_of(pid_, "status", "State:")[0] == 'Z'; }, kPatience));
  }
  pid_t pid() const { return pid_; }

 private:
  Memory memory_;
  Rig rig_;
  UniqueFd pipe_;
  pid_t pid_ = -1;
};

void expect_filled(const Mapping& mapping, std::size_t index, unsigned char fill) {
  const std::span<std::byte> bytes = mapping.bytes(mapping.manifest().buffers.at(index));
  const std::vector<std::byte> wanted(bytes.size(), static_cast<std::byte>(fill));
  EXPECT_EQ(std::memcmp(bytes.data(), wanted.data(), wanted.size()), 0);
}

TEST(Snapshot, CommitsASealedSegment) {
  const Memory large(20 << 20, 1), small(5, 2);  // more than two chunks, and less than a page
  Rig rig({large.source(), small.source(), {nullptr, 0}});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  ASSERT_TRUE(rig.acknowledge());
  const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
  ASSERT_TRUE(report);
  EXPECT_EQ(report->error, 0);
  EXPECT_TRUE(to_status(*report).ok());
  Result<std::shared_ptr<Mapping>> mapping = Mapping::map(rig.segment.get());
  ASSERT_OK(mapping);
  EXPECT_EQ(mapping.value()->manifest().id, 7u);
  expect_filled(*mapping.value(), 0, 1);
  expect_filled(*mapping.value(), 1, 2);
}

TEST(Snapshot, KeepsWhatMemoryHeldAtTheFork) {
  const Memory memory(64 << 20, 1);
  Rig rig({memory.source()});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  std::memset(memory.data(), 2, memory.size());
  ASSERT_TRUE(rig.acknowledge());
  ASSERT_TRUE(report_of(pipe.value().get()));
  Result<std::shared_ptr<Mapping>> mapping = Mapping::map(rig.segment.get());
  ASSERT_OK(mapping);
  expect_filled(*mapping.value(), 0, 1);
}

TEST(Snapshot, SurvivesAnUnmapOfItsSource) {
  auto memory = std::make_unique<Memory>(64 << 20, 3);
  Rig rig({memory->source()});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  memory.reset();
  ASSERT_TRUE(rig.acknowledge());
  Result<std::shared_ptr<Mapping>> mapping = Mapping::map(rig.segment.get());
  ASSERT_OK(mapping);
  expect_filled(*mapping.value(), 0, 3);
}

// Whether this kernel collapses pages of a memfd on request (Linux 6.1).
bool can_collapse() {
  constexpr std::size_t kSize = 2 * kHugePage;
  const UniqueFd fd = create_segment("overmind:probe", kSize).value();
  const std::vector<std::byte> filled(kSize, std::byte{1});
  if (::pwrite(fd.get(), filled.data(), kSize, 0) != static_cast<ssize_t>(kSize)) return false;
  void* room = ::mmap(nullptr, 2 * kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto start = (reinterpret_cast<std::uintptr_t>(room) + kHugePage - 1) & ~(kHugePage - 1);
  void* data = ::mmap(reinterpret_cast<void*>(start), kSize, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd.get(), 0);
  const bool done = ::madvise(data, kHugePage, 25 /* MADV_COLLAPSE */) == 0;
  const int error = errno;
  ::munmap(room, 2 * kSize);
  return done || error != EINVAL;
}

TEST(Snapshot, PagesBecomeHugeAfterTheCommit) {
  if (!can_collapse()) GTEST_SKIP() << "this kernel has no MADV_COLLAPSE for memfds";
  const Memory memory(16 << 20, 4);
  Rig rig({memory.source()});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  ASSERT_TRUE(rig.acknowledge());
  ASSERT_TRUE(report_of(pipe.value().get()));
  ASSERT_TRUE(wait_until([&] { return snapshot_children(rig.segment.get()).empty(); }, kPatience));
  Result<std::shared_ptr<Mapping>> mapping = Mapping::map(rig.segment.get());
  ASSERT_OK(mapping);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping.value()->data()) % kHugePage, 0u);
  expect_filled(*mapping.value(), 0, 4);
  EXPECT_NE(line_of(::getpid(), "smaps_rollup", "ShmemPmdMapped:"), "0 kB");
  mapping.value()->data()[9 << 20] = std::byte{5};  // a write splits one of them, for this process alone
  Result<std::shared_ptr<Mapping>> other = Mapping::map(rig.segment.get());
  ASSERT_OK(other);
  expect_filled(*other.value(), 0, 4);
}

TEST(Snapshot, LeavesNoDescriptorChildOrSignalBehind) {
  static std::atomic<int> signals;
  signals = 0;
  struct sigaction before {
  }, count{};
  count.sa_handler = [](int) { ++signals; };
  ASSERT_EQ(::sigaction(SIGCHLD, &count, &before), 0);
  const Memory memory(1 << 20);
  const std::size_t descriptors = testing::open_descriptors();
  for (int i = 0; i < 20; ++i) {
    Rig rig({memory.source()});
    Result<UniqueFd> pipe = rig.fork();
    ASSERT_OK(pipe);
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG | __WALL), -1);
    ASSERT_TRUE(rig.acknowledge());
    ASSERT_TRUE(report_of(pipe.value().get()));
    char byte;
    EXPECT_EQ(::read(pipe.value().get(), &byte, 1), 0);  // it has let go of the pipe
    EXPECT_TRUE(wait_until([&] { return snapshot_children(rig.segment.get()).empty(); }, kPatience));
  }
  EXPECT_EQ(testing::open_descriptors(), descriptors);
  EXPECT_EQ(signals, 0);
  EXPECT_EQ(::sigaction(SIGCHLD, &before, nullptr), 0);
}

TEST(Snapshot, LeavesTheSignalMaskAlone) {
  sigset_t mask, after;
  sigemptyset(&mask);
  sigaddset(&mask, SIGUSR1);
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, &mask, nullptr), 0);
  { const WaitingChild child; }
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, nullptr, &after), 0);
  for (int number = 1; number < 32; ++number) EXPECT_EQ(sigismember(&after, number), number == SIGUSR1) << number;
  sigemptyset(&mask);
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, &mask, nullptr), 0);
}

TEST(Snapshot, ChildHoldsOnlyItsThreeDescriptors) {
  std::vector<UniqueFd> others;
  for (int i = 0; i < 50; ++i) others.emplace_back(::open("/dev/null", O_RDONLY));  // not even close-on-exec
  const WaitingChild child;
  std::vector<std::string> held;
  for (const auto& fd : std::filesystem::directory_iterator("/proc/" + std::to_string(child.pid()) + "/fd")) {
    held.push_back(std::filesystem::read_symlink(fd).string());
  }
  std::sort(held.begin(), held.end());
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0].rfind("/memfd:overmind", 0), 0u) << held[0];
  EXPECT_EQ(held[1].rfind("pipe:", 0), 0u) << held[1];
  EXPECT_EQ(held[2].rfind("socket:", 0), 0u) << held[2];
}

TEST(Snapshot, ChildHoldsOnlyItsDescriptorsWhileItWrites) {
  const Memory memory(512 << 20);
  Rig rig({memory.source()});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  struct stat info {};
  ASSERT_TRUE(wait_until([&] { return ::fstat(rig.segment.get(), &info) == 0 && info.st_blocks > 0; }, kPatience));
  const std::vector<pid_t> children = snapshot_children(rig.segment.get());
  ASSERT_EQ(children.size(), 1u);
  const std::filesystem::path folder = "/proc/" + std::to_string(children[0]) + "/fd";
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()), 3);
  EXPECT_FALSE(readable(rig.daemon_end.get(), 0)) << "was not looked at while writing: make the source larger";
  ASSERT_TRUE(rig.acknowledge());
  ASSERT_TRUE(report_of(pipe.value().get()));
}

TEST(Snapshot, ChildStepsAside) {
  const WaitingChild child;
  EXPECT_EQ(line_of(child.pid(), "status", "Name:"), "overmind-snap");
  EXPECT_NE(::getsid(child.pid()), ::getsid(0));
  EXPECT_NE(::getpgid(child.pid()), ::getpgid(0));
  EXPECT_EQ(::sched_getscheduler(child.pid()), SCHED_IDLE);
  EXPECT_EQ(::syscall(SYS_ioprio_get, 1, child.pid()) >> 13, 3);  // IOPRIO_CLASS_IDLE
  EXPECT_EQ(line_of(child.pid(), "oom_score_adj", ""), "1000");
  EXPECT_EQ(std::filesystem::read_symlink("/proc/" + std::to_string(child.pid()) + "/cwd"), "/");
  EXPECT_NE(line_of(child.pid(), "status", "PPid:"), std::to_string(::getpid()));
}

TEST(Snapshot, ChildIsDeafToTheSignalsOfItsKernel) {
  const WaitingChild child;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGQUIT, SIGUSR1}) {
    ASSERT_EQ(::kill(child.pid(), signal), 0) << signal;
  }
  // The destructor expects its report.
}

// A process of its own that forks a snapshot and then stays until it is killed. `started` is readable
// once the snapshot runs.
struct Kernel {
  explicit Kernel(Rig& rig) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) ::abort();
    started.reset(ends[0]);
    UniqueFd out(ends[1]);
    pid = ::fork();
    if (pid == 0) {
      ::setpgid(0, 0);
      Result<UniqueFd> pipe = rig.fork();
      const char ok = pipe.ok() ? 1 : 0;
      if (::write(out.get(), &ok, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    rig.child_end.reset();
  }
  void wait_end() {
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
  }
  pid_t pid = -1;
  UniqueFd started;
};

void expect_commit_after(const std::function<void(pid_t)>& kill_kernel) {
  const Memory memory(256 << 20, 9);
  Rig rig({memory.source()});
  Kernel kernel(rig);
  char ok = 0;
  ASSERT_EQ(::read(kernel.started.get(), &ok, 1), 1);
  ASSERT_EQ(ok, 1);
  kill_kernel(kernel.pid);
  kernel.wait_end();
  ASSERT_TRUE(rig.acknowledge());
  Result<std::shared_ptr<Mapping>> mapping = Mapping::map(rig.segment.get());
  ASSERT_OK(mapping);
  expect_filled(*mapping.value(), 0, 9);
}

TEST(Snapshot, SurvivesTheDeathOfItsKernel) {
  expect_commit_after([](pid_t pid) { ASSERT_EQ(::kill(pid, SIGKILL), 0); });
}

TEST(Snapshot, SurvivesAKillOfItsKernelsGroup) {
  expect_commit_after([](pid_t pid) { ASSERT_EQ(::killpg(pid, SIGKILL), 0); });
}

TEST(Snapshot, WorksFromAThreadWhileOthersHoldLocksAndAllocate) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> busy;
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back([&stop] {
      while (!stop) std::make_unique<std::array<char, 5000>>()->fill(1);
    });
  }
  std::thread([] {
    for (int i = 0; i < 50; ++i) {
      const Memory memory(100'000);
      Rig rig({memory.source()});
      Result<UniqueFd> pipe = rig.fork();
      ASSERT_OK(pipe);
      ASSERT_TRUE(rig.acknowledge());
      const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
      ASSERT_TRUE(report && report->error == 0);
    }
  }).join();
  stop = true;
  for (std::thread& thread : busy) thread.join();
}

TEST(Snapshot, TakesASocketThatDoesNotBlock) {
  const Memory memory(4096);
  Rig rig({memory.source()});
  ASSERT_EQ(::fcntl(rig.child_end.get(), F_SETFL, O_NONBLOCK), 0);
  // Fill the way to the daemon first: the child must wait until there is room.
  while (::send(rig.child_end.get(), "x", 1, MSG_DONTWAIT) == 1) {
  }
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  ASSERT_TRUE(wait_until([&] { return ::fcntl(rig.segment.get(), F_GET_SEALS) != 0; }, kPatience));
  EXPECT_FALSE(readable(pipe.value().get(), 0));
  char byte;
  while (::recv(rig.daemon_end.get(), &byte, 1, MSG_PEEK) == 1 && byte == 'x') {
    ASSERT_EQ(::recv(rig.daemon_end.get(), &byte, 1, 0), 1);
  }
  ASSERT_TRUE(rig.acknowledge());
  const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
  EXPECT_TRUE(report && report->error == 0);
}

TEST(SnapshotFails, WhenASourceCannotBeRead) {
  const Memory good(4096);
  void* hole = ::mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(hole, MAP_FAILED);
  Rig rig({good.source(), {hole, 1 << 20}});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
  ASSERT_TRUE(report);
  EXPECT_EQ(report->error, EFAULT);
  EXPECT_EQ(to_status(*report).code(), Code::kIo);
  EXPECT_EQ(to_status(*report).message().rfind("snapshot: writing the segment: ", 0), 0u);
  char byte;
  EXPECT_EQ(::recv(rig.daemon_end.get(), &byte, 1, 0), 0);  // closed without a frame
  EXPECT_EQ(Mapping::map(rig.segment.get()).status().code(), Code::kInvalid);
  ::munmap(hole, 1 << 20);
}

TEST(SnapshotFails, WhenASourceEndsEarly) {
  Memory memory(4 << 20);
  ASSERT_EQ(::mprotect(memory.data() + (2 << 20), 1 << 20, PROT_NONE), 0);
  Rig rig({memory.source()});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
  ASSERT_TRUE(report);
  EXPECT_EQ(report->error, EFAULT);
}

TEST(SnapshotFails, WhenTheDaemonRefuses) {
  const Memory memory(4096);
  Rig rig({memory.source()});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  char frame[64];
  ASSERT_EQ(::recv(rig.daemon_end.get(), frame, sizeof frame, 0), static_cast<ssize_t>(sizeof kFrame));
  rig.daemon_end.reset();
  const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
  ASSERT_TRUE(report);
  EXPECT_EQ(to_status(*report).code(), Code::kUnavailable);
}

TEST(SnapshotFails, WhenTheDaemonIsGone) {
  const Memory memory(4096);
  Rig rig({memory.source()});
  rig.daemon_end.reset();
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
  ASSERT_TRUE(report);
  EXPECT_EQ(report->error, EPIPE);
  EXPECT_FALSE(to_status(*report).ok());
}

TEST(SnapshotFails, SilentlyWhenKilled) {
  const Memory memory(4096);
  Rig rig({memory.source()});
  Result<UniqueFd> pipe = rig.fork();
  ASSERT_OK(pipe);
  ASSERT_TRUE(readable(rig.daemon_end.get(), kPatience));
  for (const pid_t pid : snapshot_children(rig.segment.get())) ::kill(pid, SIGKILL);
  EXPECT_FALSE(report_of(pipe.value().get()));
}

TEST(SnapshotFails, ForSourcesOfAnotherPlan) {
  const Memory memory(4096);
  Rig rig({memory.source()});
  rig.sources.pop_back();
  EXPECT_EQ(rig.fork().status().code(), Code::kInvalid);
}

// Runs `body` in a process whose limits it may change; true when it returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The limit was lowered after the segment was made: a signal in the child, were it not blocked.
TEST(SnapshotLimits, FileSize) {
  EXPECT_TRUE(in_child([] {
    const Memory memory(2 << 20);
    Rig rig({memory.source()});
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    Result<UniqueFd> pipe = rig.fork();
    if (!pipe.ok()) return false;
    const std::optional<SnapshotStatus> report = report_of(pipe.value().get());
    return report && report->error == EFBIG && to_status(*report).code() == Code::kExhausted;
  }));
}

TEST(SnapshotLimits, Descriptors) {
  EXPECT_TRUE(in_child([] {
    const Memory memory(4096);
    Rig rig({memory.source()});
    const rlimit limit{4, 4};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
    return rig.fork().status().code() == Code::kExhausted;
  }));
}

// A filter that answers one system call with `error`.
bool forbid(long number, int error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{4, code};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(SnapshotLimits, NoProcess) {
  EXPECT_TRUE(in_child([] {
    const Memory memory(4096);
    Rig rig({memory.source()});
    return forbid(SYS_clone, EAGAIN) && rig.fork().status().code() == Code::kExhausted;
  }));
}

TEST(SnapshotLimits, OldKernelWithoutCloseRange) {
  EXPECT_TRUE(in_child([] {
    const Memory memory(4096);
    Rig rig({memory.source()});
    std::vector<UniqueFd> others;
    for (int i = 0; i < 300; ++i) others.emplace_back(::open("/dev/null", O_RDONLY));
    if (!forbid(SYS_close_range, ENOSYS)) return false;
    Result<UniqueFd> pipe = rig.fork();
    if (!pipe.ok() || !readable(rig.daemon_end.get(), kPatience)) return false;
    std::size_t held = 0;
    for (const pid_t pid : snapshot_children(rig.segment.get())) {
      const std::filesystem::path folder = "/proc/" + std::to_string(pid) + "/fd";
      if (line_of(pid, "status", "Name:") != "overmind-snap") continue;  // the test itself holds the segment too
      for ([[maybe_unused]] const auto& fd : std::filesystem::directory_iterator(folder)) ++held;
    }
    return held == 3 && rig.acknowledge();
  }));
}

TEST(SnapshotReport, SaysWhatFailed) {
  EXPECT_TRUE(to_status({0, 0}).ok());
  EXPECT_EQ(to_status({ENOSPC, 2}).to_string(), "exhausted: snapshot: writing the segment: No space left on device");
  EXPECT_EQ(to_status({ETIMEDOUT, 5}).code(), Code::kTimeout);
  EXPECT_FALSE(to_status({EIO, 99}).ok());
}

}  // namespace
}  // namespace overmind
