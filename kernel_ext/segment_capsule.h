// SPDX-License-Identifier: MIT
// How _core hands a mapped segment to _torch: plain C in a PyCapsule, because the two modules may
// have been built by different compilers against different libraries.
#pragma once

#include <cstdint>

#include "core/manifest.h"

namespace overmind {

constexpr char kSegmentCapsule[] = "overmind.SegmentView/2";

// Where buffer i of the manifest is in this process: in the segment, or in a file that it was borrowed from.
struct BufferView {
  std::byte* data;
  std::uint64_t size;
};

// Valid while the capsule lives, or while the caller holds a retain() of `owner`. retain and release are
// thread-safe, need no GIL, and may be called while the interpreter ends; the last release unmaps.
struct SegmentView {
  std::byte* data;
  std::uint64_t size;
  Range tensors;
  const BufferView* buffers;
  std::uint64_t buffer_count;
  void* owner;
  void (*retain)(void* owner);
  void (*release)(void* owner);
};

}  // namespace overmind
