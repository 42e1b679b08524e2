// SPDX-License-Identifier: MIT
// Python bytes and (address, nbytes) pairs as the core takes them: views, no copies.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/segment.h"

namespace overmind {

// Valid as long as `bytes`.
inline std::span<const std::byte> as_bytes(const pybind11::bytes& bytes) {
  const auto text = static_cast<std::string_view>(bytes);
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline std::vector<Source> to_sources(const pybind11::sequence& buffers) {
  std::vector<Source> sources;
  sources.reserve(buffers.size());
  for (const pybind11::handle pair : buffers) {
    const auto [address, size] = pair.cast<std::pair<std::uintptr_t, std::uint64_t>>();
    sources.push_back({reinterpret_cast<const void*>(address), size});
  }
  return sources;
}

}  // namespace overmind
