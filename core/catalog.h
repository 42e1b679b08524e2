// SPDX-License-Identifier: MIT
// Which entries there are, by id and by key, who maps them, and how many bytes that makes.
//
// An entry that is removed while processes map it leaves a ghost: its bytes stay in memory until the
// last of them unmaps, so they stay in the account.
// Thread safety: none; the server's loop owns it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "core/protocol.h"
#include "core/unique_fd.h"

namespace overmind {

struct Entry {
  EntryId id = 0;
  Key key{};
  std::uint64_t nbytes = 0;
  std::uint64_t created_ns = 0, native_ns = 0;
  std::string loader, target;
  UniqueFd fd;           // the sealed segment
  double last_used = 0;  // seconds since the epoch; the order of eviction
  std::uint64_t hits = 0;
  std::uint32_t mapped_by = 0;  // processes
  bool pinned = false;

  EntryInfo info() const;
};

// Checks that `fd` is a sealed segment whose manifest fits its size, and reads what the catalog needs.
// Reads with pread: a hole in a mapping would allocate memory, and raise SIGBUS when there is none.
// Errors: kInvalid, kIo.
Result<Entry> read_entry(UniqueFd fd);

class Catalog {
 public:
  // Null when there is none. Pointers stay valid until the entry is removed.
  const Entry* find(const Key& key) const;
  const Entry* find(EntryId id) const;
  const std::map<EntryId, Entry>& entries() const { return entries_; }

  // REQUIRES: no entry has this id or this key; `entry.mapped_by` is 0.
  const Entry& put(Entry entry);
  // False when there is none.
  bool remove(EntryId id);

  void use(EntryId id, double now, bool hit);  // unknown ids are ignored
  bool pin(EntryId id, bool on);               // false when there is none

  // One more, or one fewer, process maps `id`. Ghosts count too; unknown ids are ignored.
  void map(EntryId id);
  void unmap(EntryId id);

  struct Bytes {
    std::uint64_t committed = 0, pinned = 0, mapped = 0, ghosts = 0;  // mapped includes ghosts
  };
  Bytes bytes() const;

 private:
  struct Ghost {
    std::uint64_t nbytes;
    std::uint32_t mapped_by;
  };
  std::map<EntryId, Entry> entries_;
  std::map<Key, EntryId> by_key_;
  std::map<EntryId, Ghost> ghosts_;
};

}  // namespace overmind
