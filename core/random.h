// SPDX-License-Identifier: MIT
#pragma once

#include <sys/random.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>

namespace overmind {

// Never 0, which stands for "none" wherever an id or token may be absent.
inline std::uint64_t random_u64() {
  std::uint64_t value = 0;
  // Eight bytes are given whole once the pool is ready; the mix is for a machine that forbids the call.
  while (value == 0) {
    if (::getrandom(&value, sizeof(value), 0) == sizeof(value)) continue;
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    value = static_cast<std::uint64_t>(now.tv_nsec) << 32 ^ static_cast<std::uint64_t>(::getpid()) ^
            reinterpret_cast<std::uintptr_t>(&now);
  }
  return value;
}

}  // namespace overmind
