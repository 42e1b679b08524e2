// SPDX-License-Identifier: MIT
// Which entries go when room is needed: unpinned ones that no live process maps, least recently used
// first. A mapped one frees nothing when it goes, so it goes only when descriptors are what is short.
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/catalog.h"
#include "core/status.h"

namespace overmind {

struct Limits {
  std::uint64_t budget = 0;  // bytes
  std::size_t entries = 0;   // one descriptor each
  std::size_t files = 0;     // descriptors of this process; told to people, who can raise it
};

struct Demand {
  std::uint64_t bytes = 0;      // of the new segment
  std::uint64_t reserved = 0;   // bytes promised to snapshots on their way
  std::uint64_t unwritten = 0;  // the part of `reserved` that takes no memory yet
  std::size_t snapshots = 0;    // how many those are
  std::uint64_t available = 0;  // what the machine and the cgroup can give now, bytes
};

// How many entries have to go because their descriptors are needed.
std::size_t excess_entries(const Catalog& catalog, const Limits& limits, const Demand& demand);

// "the daemon's limit of 1024 open files leaves room for 496 entries; raise `ulimit -Hn`, then `overmind stop`".
std::string files_reason(const Limits& limits);

// What has to be evicted first, in order; nothing is evicted for a demand that can't be met.
// Errors: kExhausted, "needs 9.1 GiB; budget 8.0 GiB, of which 6.0 GiB is pinned".
Result<std::vector<EntryId>> make_room(const Catalog& catalog, const Limits& limits, const Demand& demand);

// What to evict to give `bytes` back to a machine under memory pressure; may be too little.
std::vector<EntryId> relieve(const Catalog& catalog, std::uint64_t bytes);

std::string human_bytes(std::uint64_t bytes);  // "9.1 GiB"

}  // namespace overmind
