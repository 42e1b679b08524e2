// SPDX-License-Identifier: MIT
// The bytes of a segment as C++ sees them; FORMAT.md is the document. Used by manifest.cc (writer and
// parser), its test and its fuzzer, by nobody else: all others see a Manifest.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace overmind::segment_format {

static_assert(std::endian::native == std::endian::little, "a segment is little-endian and never leaves its machine");

constexpr char kMagic[8] = {'O', 'V', 'M', 'D', 'S', 'E', 'G', '\n'};
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kHeadAlign = 8;  // of meta, tensors, buffer table and skeleton

struct RawRange {
  std::uint64_t offset;
  std::uint64_t size;
};

// At byte 0. No padding, so the struct is the format.
struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_size;
  std::uint64_t checksum;  // of the header, this field taken as 0
  std::uint64_t total_size;
  std::uint64_t id;
  std::uint64_t created_ns;
  std::uint64_t native_ns;
  std::uint8_t key[32];
  RawRange loader;  // these six in the order of their places
  RawRange target;
  RawRange meta;
  RawRange tensors;
  RawRange buffers;  // the table: one RawRange per buffer
  RawRange skeleton;
  std::uint64_t reserved;  // 0
};
static_assert(sizeof(Header) == 192);
static_assert(offsetof(Header, key) == 56 && offsetof(Header, loader) == 88 && offsetof(Header, skeleton) == 168);

// FNV-1a, 64 bit. Tells a segment from garbage and from a half-written header; no defence against
// intent, and none is needed: only the user's own processes can hand one in. 192 bytes take 0.2 us.
inline std::uint64_t checksum(Header header) {
  header.checksum = 0;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::byte byte : std::as_bytes(std::span(&header, 1))) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace overmind::segment_format
