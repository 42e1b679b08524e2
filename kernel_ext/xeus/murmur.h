// SPDX-License-Identifier: MIT
// MurmurHash2, 32 bits: how Jupyter's debugger protocol names a cell's file after its text.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace overmind::kernel {

inline std::uint32_t murmur2(std::string_view text, std::uint32_t seed) {
  static_assert(std::endian::native == std::endian::little);
  constexpr std::uint32_t kFactor = 0x5BD1E995;
  std::uint32_t hash = seed ^ static_cast<std::uint32_t>(text.size());
  for (; text.size() >= 4; text.remove_prefix(4)) {
    std::uint32_t word;
    std::memcpy(&word, text.data(), 4);
    word *= kFactor;
    word ^= word >> 24;
    hash = (hash * kFactor) ^ (word * kFactor);
  }
  if (!text.empty()) {
    std::uint32_t word = 0;
    std::memcpy(&word, text.data(), text.size());
    hash = (hash ^ word) * kFactor;
  }
  hash = (hash ^ (hash >> 13)) * kFactor;
  return hash ^ (hash >> 15);
}

}  // namespace overmind::kernel
