// SPDX-License-Identifier: MIT
// Which globals a pickle refers to, without running it. No Python.
#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "core/status.h"

namespace overmind {

// (module, qualified name) of every global. Exact for what CPython's C pickler writes with protocol 4 or 5; a
// pickle that this can't follow to its end is kInvalid, never a partial answer; so is one that rebuilds an object
// from arguments that hold the object itself.
Result<std::set<std::pair<std::string, std::string>>> pickle_globals(std::span<const std::byte> pickle);

}  // namespace overmind
