// SPDX-License-Identifier: MIT
// What one segment holds, and where. See FORMAT.md for the bytes.
//
// A segment describes itself, so a daemon that lost everything else can rebuild its catalog from
// the descriptors alone. parse_manifest() is the only door: after it, no range needs a check again.
// Thread safety: plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace overmind {

using Key = std::array<std::uint8_t, 32>;  // what was asked for; SHA-256 made by the client
using EntryId = std::uint64_t;             // random, chosen by the publisher; written as 16 hex digits

// Bytes [offset, offset + size) of the segment.
struct Range {
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
};

struct Manifest {
  Key key{};
  EntryId id = 0;
  std::uint64_t total_size = 0;  // of the segment, bytes
  std::uint64_t created_ns = 0;  // CLOCK_REALTIME at publication
  std::uint64_t native_ns = 0;   // what the native load took
  std::string loader;            // "transformers.PreTrainedModel.from_pretrained"
  std::string target;            // what was loaded, for people: a path or a repo id
  Range meta;                    // opaque to core: dependencies, log lines (JSON by Python)
  Range skeleton;                // opaque to core: pickle
  Range tensors;                 // opaque to core: records read by kernel_ext/module_torch.cc
  std::vector<Range> buffers;    // storages and arrays, ascending; see plan_segment()
};

constexpr std::uint64_t kBufferAlign = 64;  // of what torch allocates, and of what its kernels ask at most
constexpr std::uint64_t kPageAlign = 4096;
constexpr std::uint64_t kPageAlignFrom = 64 * 1024;   // smaller ones share pages, or 70,000 scalars would cost 280 MB
constexpr std::uint64_t kHugePage = 2 * 1024 * 1024;  // of x86-64, and of arm64 with 4 KiB pages
constexpr std::uint64_t kMaxString = 4096;            // loader, target
constexpr std::uint64_t kMaxBuffers = 1u << 22;

// Never reads outside `head`, never throws for content. `head` starts at byte 0 of the segment and
// may be the whole segment or any prefix; `segment_size` is the true size (fstat).
// Errors: kInvalid, naming the first thing that is wrong.
Result<Manifest> parse_manifest(std::span<const std::byte> head, std::uint64_t segment_size);

// The bytes that go before the buffers, and where every buffer goes.
struct SegmentPlan {
  std::vector<std::byte> head;  // bytes [0, head.size())
  std::vector<Range> buffers;
  std::uint64_t total_size = 0;
};

// Fields of `draft` that describe places (meta, skeleton, tensors, buffers, total_size) are ignored
// and computed here. Errors: kInvalid (a string too long, too many buffers), kExhausted (size overflow).
//
// Buffers are 64-byte aligned, from kPageAlignFrom bytes on page-aligned; where `addresses` says where each lies now,
// moved by what that is more than a multiple of 64. A kernel may add in another order where a matrix begins elsewhere:
// weights that lie in a mapped file 8 bytes after a multiple of 16 give other bits, natively and so after a hit.
Result<SegmentPlan> plan_segment(const Manifest& draft, std::span<const std::byte> meta,
                                 std::span<const std::byte> skeleton, std::span<const std::byte> tensors,
                                 std::span<const std::uint64_t> buffer_sizes,
                                 std::span<const std::uint64_t> addresses = {});

std::string entry_id_to_string(EntryId id);                   // 16 lower-case hex digits
Result<EntryId> entry_id_from_string(std::string_view text);  // kInvalid

}  // namespace overmind
