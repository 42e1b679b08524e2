// SPDX-License-Identifier: MIT
// The bytes of Segment.tensors: which tensor lies on which storage. Written by the packer, read by
// the builder and by overmind/torch_fallback.py, which must be changed together with this file.
//
// Little-endian, packed, in this order:
//   RecordsHeader
//   StorageRecord  x storage_count      those with nbytes > 0 own buffers 0, 1, 2, ... of the segment
//   ItemRecord + ndim sizes + ndim strides (int64)  x item_count      item i is persistent id i
//   attributes_size bytes: pickle of [(item, {name: value}), ...], empty when there are none
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace overmind {

constexpr std::uint32_t kRecordsMagic = 0x31544d4f;  // "OMT1"

struct RecordsHeader {
  std::uint32_t magic;
  std::uint32_t storage_count;
  std::uint32_t buffer_count;  // storages with nbytes > 0; pickle's own buffers follow them in the segment
  std::uint32_t item_count;
  std::uint32_t attributes_size;
  std::uint32_t reserved;
  std::uint64_t next_hook_id;  // torch.utils.hooks.RemovableHandle.next_id when the snapshot was taken
};

struct StorageRecord {
  std::uint64_t nbytes;
  std::uint32_t resizable;
  std::uint32_t reserved;
};

enum class ItemKind : std::uint8_t { kTensor, kParameter, kUntypedStorage, kTypedStorage, kSubstitute };

constexpr std::uint8_t kRequiresGrad = 1;

struct ItemRecord {
  ItemKind kind;
  std::uint8_t dtype;  // c10::ScalarType
  std::uint8_t flags;  // kRequiresGrad
  std::uint8_t ndim;
  std::uint32_t index;  // of the storage; of the substitute for kSubstitute
  std::int64_t offset;  // of the first element, in elements
};

static_assert(sizeof(RecordsHeader) == 32 && sizeof(StorageRecord) == 16 && sizeof(ItemRecord) == 16);

// Whether every element lies inside a storage of `nbytes`. Never overflows, whatever the record holds.
inline bool tensor_fits(std::int64_t offset, std::size_t itemsize, std::uint64_t nbytes,
                        std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides) {
  if (offset < 0) return false;
  std::int64_t last = offset;
  bool empty = false;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0) return false;
    if (sizes[i] == 0) empty = true;
    std::int64_t reach = 0;
    if (sizes[i] > 1 &&
        (__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) || __builtin_add_overflow(last, reach, &last)))
      return false;
  }
  std::uint64_t end = 0;
  return empty || (!__builtin_mul_overflow(static_cast<std::uint64_t>(last) + 1, itemsize, &end) && end <= nbytes);
}

}  // namespace overmind
