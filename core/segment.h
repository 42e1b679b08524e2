// SPDX-License-Identifier: MIT
// A segment is one sealed memfd that holds one entry. Life: create, write, seal, commit; after the
// seal nobody, not even its maker, can change or resize it. Readers map it MAP_PRIVATE: a write
// makes a private copy of the page and is seen by nobody else.
// Thread safety: functions are re-entrant; a Mapping is immutable and may be shared between threads.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "core/manifest.h"
#include "core/status.h"
#include "core/unique_fd.h"

namespace overmind {

// A memfd of exactly `size` bytes, close-on-exec, sealable, not executable. No byte is allocated yet.
// Checks RLIMIT_FSIZE first: exceeding it would raise SIGXFSZ in the user's process.
// Errors: kExhausted (memory, descriptors, limits), kUnavailable (no memfd on this machine), kIo.
Result<UniqueFd> create_segment(std::string_view name, std::uint64_t size);

// One source per buffer of the plan, same order. Memory is the caller's and only read.
struct Source {
  const void* data;
  std::uint64_t size;
};

// As plan_segment(), with the sizes and places of these.
Result<SegmentPlan> plan_segment_of(const Manifest& draft, std::span<const std::byte> meta,
                                    std::span<const std::byte> skeleton, std::span<const std::byte> tensors,
                                    std::span<const Source> sources);

// kInvalid unless there is one source per buffer, each of the planned size.
Status check_sources(const SegmentPlan& plan, std::span<const Source> sources);

// Writes head and buffers in the calling thread (pwrite: 1-1.5 GB/s where faulting a mapping in
// gave 0.3-0.8). Errors: kExhausted when memory or the limit is reached, kIo.
Status write_segment(int fd, const SegmentPlan& plan, std::span<const Source> sources);

// F_SEAL_SEAL | SHRINK | GROW | WRITE. Errors: kIo.
Status seal_segment(int fd);

// A private, writable mapping of a sealed segment, its manifest validated. Unmapped on destruction,
// so whoever builds a tensor on it holds the shared_ptr.
class Mapping {
 public:
  // Does not take `fd`. Errors: kInvalid (not sealed, bad manifest), kExhausted (RLIMIT_AS,
  // max_map_count, memory), kIo.
  static Result<std::shared_ptr<Mapping>> map(int fd);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return manifest_.total_size; }
  const Manifest& manifest() const { return manifest_; }
  std::span<std::byte> bytes(Range range) const { return {data_ + range.offset, range.size}; }

 private:
  Mapping(std::byte* data, Manifest manifest) : data_(data), manifest_(std::move(manifest)) {}
  std::byte* data_;
  Manifest manifest_;
};

}  // namespace overmind
