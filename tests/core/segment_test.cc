// SPDX-License-Identifier: MIT
#include "core/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>

#include "tests/core/testing.h"

namespace overmind {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Three buffers with bytes that tell their place, and a plan for them.
struct Entry {
  Entry() {
    for (const std::size_t size : {std::size_t{5}, std::size_t{200'000}, std::size_t{64}}) {
      std::vector<std::byte> buffer(size);
      for (std::size_t i = 0; i < size; ++i) buffer[i] = static_cast<std::byte>(i * 7 + size);
      contents.push_back(std::move(buffer));
    }
    for (const auto& buffer : contents) sources.push_back({buffer.data(), buffer.size()});
    Manifest draft;
    draft.id = 42;
    draft.loader = "f";
    plan = plan_segment_of(draft, bytes_of("meta"), bytes_of("skeleton"), bytes_of("tensors"), sources).value();
  }
  UniqueFd write() const {
    Result<UniqueFd> fd = create_segment("overmind:test", plan.total_size);
    EXPECT_TRUE(fd.ok()) << fd.status().to_string();
    const Status status = write_segment(fd.value().get(), plan, sources);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return std::move(fd).value();
  }
  UniqueFd seal() const {
    UniqueFd fd = write();
    EXPECT_TRUE(seal_segment(fd.get()).ok());
    return fd;
  }

  std::vector<std::vector<std::byte>> contents;
  std::vector<Source> sources;
  SegmentPlan plan;
};

// Runs `body` in a process of its own, for limits that would hurt the test's; true when it returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void limit(int resource, rlim_t value) {
  const rlimit both{value, value};
  if (::setrlimit(static_cast<__rlimit_resource>(resource), &both) != 0) ::_exit(9);
}

std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:overmind") != std::string::npos;
  return count;
}

TEST(Segment, ComesBackAsWritten) {
  const Entry entry;
  const UniqueFd fd = entry.seal();
  Result<std::shared_ptr<Mapping>> mapped = Mapping::map(fd.get());
  ASSERT_OK(mapped);
  const Mapping& mapping = *mapped.value();
  EXPECT_EQ(mapping.size(), entry.plan.total_size);
  EXPECT_EQ(mapping.manifest().id, 42u);
  const std::span<std::byte> skeleton = mapping.bytes(mapping.manifest().skeleton);
  EXPECT_EQ(std::memcmp(skeleton.data(), "skeleton", skeleton.size()), 0);
  ASSERT_EQ(mapping.manifest().buffers.size(), entry.contents.size());
  for (std::size_t i = 0; i < entry.contents.size(); ++i) {
    const std::span<std::byte> buffer = mapping.bytes(mapping.manifest().buffers[i]);
    ASSERT_EQ(buffer.size(), entry.contents[i].size());
    EXPECT_EQ(std::memcmp(buffer.data(), entry.contents[i].data(), buffer.size()), 0);
    const auto lies = [](const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data) % kBufferAlign; };
    EXPECT_EQ(lies(buffer.data()), lies(entry.contents[i].data()));
  }
}

TEST(Segment, IsCloseOnExecAndNotExecutable) {
  const Entry entry;
  const UniqueFd fd = entry.write();
  EXPECT_NE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  struct stat info {};
  ASSERT_EQ(::fstat(fd.get(), &info), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(info.st_size), entry.plan.total_size);
}

TEST(Segment, AllocatesNothingBeforeItIsWritten) {
  Result<UniqueFd> fd = create_segment("overmind:test", std::uint64_t{1} << 40);
  ASSERT_OK(fd);
  struct stat info {};
  ASSERT_EQ(::fstat(fd.value().get(), &info), 0);
  EXPECT_EQ(info.st_size, std::int64_t{1} << 40);
  EXPECT_EQ(info.st_blocks, 0);
}

TEST(Segment, CannotChangeAfterTheSeal) {
  const Entry entry;
  const UniqueFd fd = entry.seal();
  EXPECT_EQ(::pwrite(fd.get(), "x", 1, 0), -1);
  EXPECT_EQ(::ftruncate(fd.get(), 1), -1);
  EXPECT_EQ(::ftruncate(fd.get(), 1 << 30), -1);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
  EXPECT_FALSE(write_segment(fd.get(), entry.plan, entry.sources).ok());
}

TEST(Segment, AWriteStaysInItsMapping) {
  const Entry entry;
  const UniqueFd fd = entry.seal();
  Result<std::shared_ptr<Mapping>> mine = Mapping::map(fd.get());
  Result<std::shared_ptr<Mapping>> other = Mapping::map(fd.get());
  ASSERT_OK(mine);
  ASSERT_OK(other);
  const Range buffer = mine.value()->manifest().buffers[1];
  const std::byte before = other.value()->bytes(buffer)[0];
  mine.value()->bytes(buffer)[0] = before ^ std::byte{0xFF};
  EXPECT_EQ(other.value()->bytes(buffer)[0], before);
  Result<std::shared_ptr<Mapping>> later = Mapping::map(fd.get());
  ASSERT_OK(later);
  EXPECT_EQ(later.value()->bytes(buffer)[0], before);
}

TEST(Segment, MappingOutlivesTheDescriptorAndEndsWithItsLastHolder) {
  const Entry entry;
  const std::size_t before = mappings();
  UniqueFd fd = entry.seal();
  Result<std::shared_ptr<Mapping>> mapped = Mapping::map(fd.get());
  ASSERT_OK(mapped);
  fd.reset();
  std::shared_ptr<Mapping> holder = std::move(mapped).value();
  EXPECT_EQ(mappings(), before + 1);
  EXPECT_EQ(holder->bytes(holder->manifest().buffers[0])[1], entry.contents[0][1]);
  holder.reset();
  EXPECT_EQ(mappings(), before);
}

TEST(Segment, LeaksNoDescriptor) {
  const Entry entry;
  const std::size_t before = testing::open_descriptors();
  {
    const UniqueFd fd = entry.seal();
    for (int i = 0; i < 10; ++i) ASSERT_OK(Mapping::map(fd.get()));
    EXPECT_EQ(testing::open_descriptors(), before + 1);
  }
  EXPECT_EQ(testing::open_descriptors(), before);
}

TEST(Segment, OfEmptyBuffersNeedsNoMemoryToReadFrom) {
  const std::vector<std::uint64_t> sizes = {0, 0};
  const SegmentPlan plan = plan_segment(Manifest(), {}, {}, {}, sizes).value();
  const std::vector<Source> sources = {{nullptr, 0}, {nullptr, 0}};
  Result<UniqueFd> fd = create_segment("overmind:test", plan.total_size);
  ASSERT_OK(fd);
  ASSERT_OK(write_segment(fd.value().get(), plan, sources));
  ASSERT_OK(seal_segment(fd.value().get()));
  ASSERT_OK(Mapping::map(fd.value().get()));
}

TEST(SegmentRefuses, SourcesOfAnotherPlan) {
  Entry entry;
  const UniqueFd fd = entry.write();
  std::vector<Source> sources = entry.sources;
  sources[1].size -= 1;
  EXPECT_EQ(write_segment(fd.get(), entry.plan, sources).code(), Code::kInvalid);
  sources = entry.sources;
  sources.pop_back();
  EXPECT_EQ(write_segment(fd.get(), entry.plan, sources).code(), Code::kInvalid);
}

TEST(SegmentRefuses, AnUnreadableSource) {
  Entry entry;
  void* hole = ::mmap(nullptr, 200'000, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(hole, MAP_FAILED);
  entry.sources[1].data = hole;
  Result<UniqueFd> fd = create_segment("overmind:test", entry.plan.total_size);
  ASSERT_OK(fd);
  const Status status = write_segment(fd.value().get(), entry.plan, entry.sources);
  EXPECT_EQ(status.code(), Code::kIo) << status.to_string();
  ::munmap(hole, 200'000);
}

TEST(MappingRefuses, ASegmentWithoutItsSeals) {
  const Entry entry;
  EXPECT_EQ(Mapping::map(entry.write().get()).status().code(), Code::kInvalid);
  for (const int missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE}) {
    const UniqueFd fd = entry.write();
    ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) & ~missing), 0);
    EXPECT_EQ(Mapping::map(fd.get()).status().code(), Code::kInvalid);
  }
}

TEST(MappingRefuses, WhatIsNoSegment) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd in(ends[0]), out(ends[1]);
  EXPECT_EQ(Mapping::map(in.get()).status().code(), Code::kInvalid);
  EXPECT_EQ(Mapping::map(-1).status().code(), Code::kInvalid);

  Result<UniqueFd> empty = create_segment("overmind:test", 0);
  ASSERT_OK(empty);
  ASSERT_OK(seal_segment(empty.value().get()));
  EXPECT_EQ(Mapping::map(empty.value().get()).status().code(), Code::kInvalid);

  const std::size_t before = mappings();
  Result<UniqueFd> zeros = create_segment("overmind:test", 10'000);
  ASSERT_OK(zeros);
  ASSERT_OK(seal_segment(zeros.value().get()));
  EXPECT_EQ(Mapping::map(zeros.value().get()).status().code(), Code::kInvalid);
  EXPECT_EQ(mappings(), before);
}

// Each limit in a process of its own: a signal would end it, and then in_child is false.
TEST(SegmentLimits, FileSize) {
  EXPECT_TRUE(in_child([] {
    limit(RLIMIT_FSIZE, 1 << 20);
    return create_segment("overmind:test", 1 << 20).ok() &&
           create_segment("overmind:test", (1 << 20) + 1).status().code() == Code::kExhausted;
  }));
}

TEST(SegmentLimits, Descriptors) {
  EXPECT_TRUE(in_child([] {
    limit(RLIMIT_NOFILE, 3);
    return create_segment("overmind:test", 1).status().code() == Code::kExhausted;
  }));
}

TEST(SegmentLimits, NoSizeIsTooLargeToAnswer) {
  EXPECT_EQ(create_segment("overmind:test", ~std::uint64_t{0}).status().code(), Code::kExhausted);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their shadows need the address space
TEST(SegmentLimits, AddressSpace) {
  EXPECT_TRUE(in_child([] {
    Result<UniqueFd> fd = create_segment("overmind:test", std::uint64_t{1} << 33);
    if (!fd.ok() || !seal_segment(fd.value().get()).ok()) return false;
    limit(RLIMIT_AS, rlim_t{1} << 32);
    return Mapping::map(fd.value().get()).status().code() == Code::kExhausted;
  }));
}
#endif

// More than the machine has: the default overcommit heuristic refuses such a mapping if it is charged.
TEST(SegmentLimits, AMappingReservesNoMemory) {
  int overcommit = 0;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> overcommit;
  if (overcommit == 2) GTEST_SKIP() << "strict overcommit charges every private mapping";
  const auto memory = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * 4096;
  const std::vector<std::uint64_t> sizes = {4 * memory};
  const SegmentPlan plan = plan_segment(Manifest(), {}, {}, {}, sizes).value();
  Result<UniqueFd> fd = create_segment("overmind:test", plan.total_size);
  ASSERT_OK(fd);
  ASSERT_EQ(::pwrite(fd.value().get(), plan.head.data(), plan.head.size(), 0), static_cast<ssize_t>(plan.head.size()));
  ASSERT_OK(seal_segment(fd.value().get()));
  ASSERT_OK(Mapping::map(fd.value().get()));
}

}  // namespace
}  // namespace overmind
