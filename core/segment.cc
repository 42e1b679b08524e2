// SPDX-License-Identifier: MIT
#include "core/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace overmind {
namespace {

constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
// What a reader relies on. F_SEAL_SEAL only keeps others from adding seals, which harms nobody.
constexpr int kNeededSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3
#endif

// One system call moves this much: large enough that its cost vanishes, small enough that a signal is served soon.
constexpr std::uint64_t kChunk = 8 << 20;

Status check_file_size_limit(std::uint64_t size) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0) return errno_status("getrlimit RLIMIT_FSIZE");
  const std::uint64_t most =
      limit.rlim_cur == RLIM_INFINITY ? std::numeric_limits<std::int64_t>::max() : std::uint64_t{limit.rlim_cur};
  if (size <= most) return {};
  return Status(Code::kExhausted, "a segment of " + std::to_string(size) + " bytes is over the file size limit of " +
                                      std::to_string(most) + " (ulimit -f); raise it");
}

int make_memfd(const char* name) {
  const int fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd >= 0 || errno != EINVAL) return fd;
  return ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);  // before 6.3
}

Status write_all(int fd, const std::byte* data, std::uint64_t size, std::uint64_t offset) {
  while (size > 0) {
    const ssize_t written = ::pwrite(fd, data, std::min(size, kChunk), static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) continue;
      return errno_status("writing a segment");
    }
    data += written;
    size -= static_cast<std::uint64_t>(written);
    offset += static_cast<std::uint64_t>(written);
  }
  return {};
}

}  // namespace

Result<UniqueFd> create_segment(std::string_view name, std::uint64_t size) {
  if (Status status = check_file_size_limit(size); !status.ok()) return status;
  // The kernel takes 249 bytes and shows the name in /proc/PID/fd and maps, to people.
  UniqueFd fd(make_memfd(std::string(name.substr(0, 200)).c_str()));
  if (!fd.valid()) {
    // EPERM and EACCES are what seccomp filters answer.
    if (errno == ENOSYS || errno == EPERM || errno == EACCES || errno == EINVAL) {
      return Status(Code::kUnavailable, errno_status("memfd_create").message() +
                                            "; this kernel or sandbox gives no memory files, which Overmind needs");
    }
    return errno_status("memfd_create");
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) return errno_status("sizing a segment");
  return fd;
}

Result<SegmentPlan> plan_segment_of(const Manifest& draft, std::span<const std::byte> meta,
                                    std::span<const std::byte> skeleton, std::span<const std::byte> tensors,
                                    std::span<const Source> sources) {
  std::vector<std::uint64_t> sizes, addresses;
  for (const Source& source : sources) {
    sizes.push_back(source.size);
    addresses.push_back(reinterpret_cast<std::uintptr_t>(source.data));
  }
  return plan_segment(draft, meta, skeleton, tensors, sizes, addresses);
}

Status check_sources(const SegmentPlan& plan, std::span<const Source> sources) {
  if (sources.size() != plan.buffers.size()) {
    return Status(Code::kInvalid, "segment: " + std::to_string(sources.size()) + " sources for " +
                                      std::to_string(plan.buffers.size()) + " buffers");
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].size != plan.buffers[i].size) {
      return Status(Code::kInvalid, "segment: source " + std::to_string(i) + " is not of the size that was planned");
    }
  }
  return {};
}

Status write_segment(int fd, const SegmentPlan& plan, std::span<const Source> sources) {
  if (Status status = check_sources(plan, sources); !status.ok()) return status;
  if (Status status = write_all(fd, plan.head.data(), plan.head.size(), 0); !status.ok()) return status;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto* data = static_cast<const std::byte*>(sources[i].data);
    if (Status status = write_all(fd, data, sources[i].size, plan.buffers[i].offset); !status.ok()) return status;
  }
  return {};
}

Status seal_segment(int fd) {
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) return errno_status("sealing a segment");
  return {};
}

namespace {

// Where the segment has huge pages (see snapshot.cc), only a mapping that begins at a multiple of their size can use
// them, and mmap gives one by chance alone. MAP_FAILED with errno on failure.
void* map_private(int fd, std::uint64_t size) {
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_NORESERVE;
  if (size < kHugePage) return ::mmap(nullptr, size, kProtection, kFlags, fd, 0);
  const std::uint64_t reserved = size + kHugePage;
  void* room = ::mmap(nullptr, reserved, PROT_NONE, kFlags | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return ::mmap(nullptr, size, kProtection, kFlags, fd, 0);
  auto* const bytes = static_cast<std::byte*>(room);
  const std::uint64_t before = -reinterpret_cast<std::uintptr_t>(room) & (kHugePage - 1);
  void* data = ::mmap(bytes + before, size, kProtection, kFlags | MAP_FIXED, fd, 0);
  const int error = errno;
  const std::uint64_t kept = data == MAP_FAILED ? 0 : (size + kPageAlign - 1) & ~(kPageAlign - 1);
  if (before > 0) ::munmap(room, before);
  if (reserved > before + kept) ::munmap(bytes + before + kept, reserved - before - kept);
  errno = error;
  return data;
}

}  // namespace

Result<std::shared_ptr<Mapping>> Mapping::map(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) return Status(Code::kInvalid, errno_status("not a segment").message());
  if ((seals & kNeededSeals) != kNeededSeals) return Status(Code::kInvalid, "segment: not sealed");
  struct stat info {};
  if (::fstat(fd, &info) != 0) return errno_status("fstat of a segment");
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size == 0) return Status(Code::kInvalid, "segment: empty");

  // MAP_NORESERVE: a private writable mapping otherwise counts in full against the commit limit, as if
  // every page were to be written. Most never are, and eight kernels with the same model would need
  // eight times its size in commit charge. Under vm.overcommit_memory=2 the flag is ignored: there
  // the mapping is charged, and where the charge does not fit, ENOMEM comes here and not as a
  // SIGBUS later. With 0 or 1 a write can at worst meet the OOM killer, like any memory there.
  void* data = map_private(fd, size);
  if (data == MAP_FAILED) return errno_status("mapping a segment of " + std::to_string(size) + " bytes");
  Result<Manifest> manifest = parse_manifest({static_cast<const std::byte*>(data), size}, size);
  if (!manifest.ok()) {
    ::munmap(data, size);
    return manifest.status();
  }
  return std::shared_ptr<Mapping>(new Mapping(static_cast<std::byte*>(data), std::move(manifest).value()));
}

Mapping::~Mapping() { ::munmap(data_, manifest_.total_size); }

}  // namespace overmind
