// SPDX-License-Identifier: MIT
#include "core/budget.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace overmind {
namespace {

// Unpinned entries, those that nobody maps first, least recently used first.
std::vector<const Entry*> candidates(const Catalog& catalog) {
  std::vector<const Entry*> found;
  for (const auto& [id, entry] : catalog.entries()) {
    if (!entry.pinned) found.push_back(&entry);
  }
  std::ranges::sort(found, [](const Entry* a, const Entry* b) {
    bool a_mapped = a->mapped_by > 0, b_mapped = b->mapped_by > 0;
    return std::tie(a_mapped, a->last_used, a->id) < std::tie(b_mapped, b->last_used, b->id);
  });
  return found;
}

std::uint64_t minus(std::uint64_t a, std::uint64_t b) { return a > b ? a - b : 0; }

Status refusal(const Catalog::Bytes& bytes, const Limits& limits, const Demand& demand) {
  std::string text = "needs " + human_bytes(demand.bytes) + "; budget " + human_bytes(limits.budget);
  std::string parts;
  auto part = [&parts](std::uint64_t size, const char* what) {
    if (size > 0) parts += (parts.empty() ? ", of which " : " and ") + human_bytes(size) + what;
  };
  part(bytes.pinned, " is pinned");
  part(bytes.mapped, " is in use by running processes");
  part(demand.reserved, " is being written");
  return {Code::kExhausted, text + parts + "; raise OVERMIND_BUDGET or drop entries"};
}

}  // namespace

std::size_t excess_entries(const Catalog& catalog, const Limits& limits, const Demand& demand) {
  return minus(catalog.entries().size() + demand.snapshots + 1, limits.entries);
}

std::string files_reason(const Limits& limits) {
  return "the daemon's limit of " + std::to_string(limits.files) + " open files leaves room for " +
         std::to_string(limits.entries) + (limits.entries == 1 ? " entry" : " entries") +
         "; raise `ulimit -Hn`, then `overmind stop`";
}

Result<std::vector<EntryId>> make_room(const Catalog& catalog, const Limits& limits, const Demand& demand) {
  Catalog::Bytes bytes = catalog.bytes();
  std::uint64_t used = bytes.committed + bytes.ghosts + demand.reserved;
  if (demand.bytes > limits.budget) return refusal(bytes, limits, demand);  // also keeps the sums from overflowing
  std::uint64_t over_budget = minus(used + demand.bytes, limits.budget);
  std::uint64_t over_memory = minus(demand.bytes + demand.unwritten, demand.available);
  std::uint64_t excess = std::max(over_budget, over_memory);
  std::size_t excess_files = excess_entries(catalog, limits, demand);

  std::vector<EntryId> evict;
  std::uint64_t freed = 0;
  for (const Entry* entry : candidates(catalog)) {
    bool frees = entry->mapped_by == 0;
    if (evict.size() >= excess_files && (freed >= excess || !frees)) break;
    evict.push_back(entry->id);
    if (frees) freed += entry->nbytes;
  }
  if (freed < over_budget) return refusal(bytes, limits, demand);
  if (freed < over_memory) {
    return Status(Code::kExhausted, "needs " + human_bytes(demand.bytes) + "; this machine or its cgroup has " +
                                        human_bytes(minus(demand.available + freed, demand.unwritten)) +
                                        " of memory to give; close programs that use much of it");
  }
  if (evict.size() < excess_files) return Status(Code::kExhausted, files_reason(limits) + ", or unpin entries");
  return evict;
}

std::vector<EntryId> relieve(const Catalog& catalog, std::uint64_t bytes) {
  std::vector<EntryId> evict;
  std::uint64_t freed = 0;
  for (const Entry* entry : candidates(catalog)) {
    if (freed >= bytes || entry->mapped_by > 0) break;
    evict.push_back(entry->id);
    freed += entry->nbytes;
  }
  return evict;
}

std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace overmind
