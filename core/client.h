// SPDX-License-Identifier: MIT
// The store, as a process sees it: look up, publish, manage. Talks to the daemon over one unix
// socket (see PROTOCOL.md) and starts the daemon when there is none.
//
// Thread safety: a Client may be used from any thread; calls are serialised by a mutex, and a call
// that waits (lookup with wait_seconds) uses a connection of its own. After a fork the child's first
// call opens a connection of its own; the parent's is never used by two processes.
// Every call has a deadline: none can hang on a stuck daemon.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/segment.h"
#include "core/snapshot.h"
#include "core/status.h"

namespace overmind {

// Right to load `key` natively and publish it. Lost when its holder (connection or snapshot child) dies.
struct Lease {
  Key key{};
  std::uint64_t token = 0;
};

// What another process does with the key right now.
struct Busy {
  bool publishing = false;         // false: it is still loading natively
  double elapsed_seconds = 0;      // since the lease was granted
  double native_seconds = 0;       // how long its native load took; 0 while unknown
  std::uint64_t written = 0;       // bytes of the segment so far
  std::uint64_t total = 0;
  double bytes_per_second = 0;     // 0 while unknown
};

struct Lookup {
  enum class Kind { kHit, kLease, kBusy, kAbsent };  // kAbsent: not there and no lease was asked for
  Kind kind = Kind::kAbsent;
  std::shared_ptr<Mapping> mapping;  // kHit
  Lease lease;                       // kLease
  Busy busy;                         // kBusy
};

struct EntryInfo {
  EntryId id = 0;
  Key key{};
  std::string loader, target;
  std::uint64_t nbytes = 0;
  double created = 0, last_used = 0;   // seconds since the epoch
  double native_seconds = 0;
  std::uint64_t hits = 0;
  std::uint32_t mapped_by = 0;         // live processes that hold a mapping
  bool pinned = false;
};

struct StoreStats {
  std::uint64_t budget = 0, used = 0, pinned = 0, mapped = 0, reserved = 0;  // bytes
  std::uint64_t entries = 0, hits = 0, misses = 0, published = 0, evicted = 0, refused = 0;
  double uptime_seconds = 0;
  std::uint64_t daemon_pid = 0, daemon_rss = 0;  // rss without segments, bytes
  std::string version;
};

// A snapshot on its way. The child that writes it goes on when this process ends.
class Publication {
 public:
  enum class State { kRunning, kCommitted, kFailed };
  // Waits up to `seconds` (0: just look). kFailed keeps its reason in failure().
  State wait(double seconds);
  const Status& failure() const { return failure_; }
  EntryId id() const { return id_; }

 private:
  friend class Client;
  EntryId id_ = 0;
  UniqueFd done_;  // read end of the child's status pipe
  State state_ = State::kRunning;
  Status failure_;
};

class Client {
 public:
  explicit Client(Config config);
  ~Client();

  // Connects now, starting the daemon when `start`. Errors: kUnavailable with the daemon's own
  // reason, kDenied (foreign or symlinked runtime folder), kTimeout, kVersion.
  Status connect(bool start);

  // With want_lease: a hit, a lease, or (after waiting up to wait_seconds for the holder) busy.
  Result<Lookup> lookup(const Key& key, bool want_lease, double wait_seconds);
  // Gives a lease back unused; the next waiter gets it. Unknown tokens are ignored.
  void abandon(const Lease& lease);

  // Publishes a result. Reads `sources` after returning only in the snapshot child's copy of this
  // process: the caller may change them as soon as this returns. Segments up to
  // `inline_limit` bytes are written before it returns; no child is forked for them.
  // Errors: kExhausted ("needs 9.1 GiB, budget 8 GiB, ..."), kUnavailable, kTimeout, kIo.
  Result<std::unique_ptr<Publication>> publish(const Lease& lease, const Manifest& draft, std::span<const std::byte> meta,
                                               std::span<const std::byte> skeleton, std::span<const std::byte> tensors,
                                               std::span<const Source> sources, std::uint64_t inline_limit);

  // Tells the daemon that this process no longer maps the entry. Queued, sent with the next call.
  void unmapped(EntryId id);

  Result<std::vector<EntryInfo>> list();
  Result<StoreStats> stats();
  Result<std::shared_ptr<Mapping>> open(EntryId id);  // kNotFound; does not count as a hit
  Status drop(EntryId id);                            // kNotFound
  Result<std::uint64_t> drop_all();                   // how many
  Status pin(EntryId id, bool pinned);                // kNotFound
  Status stop();                                      // ok when none runs

  const Config& config() const { return config_; }

 private:
  class Impl;
  Config config_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace overmind
