// SPDX-License-Identifier: MIT
// The store, as a process sees it: look up, publish, manage. Talks to the daemon over one unix
// socket (see PROTOCOL.md) and starts the daemon when there is none.
//
// Thread safety: a Client may be used from any thread; calls are serialised by a mutex, and a call
// that waits (lookup with wait_seconds) uses a connection of its own. After a fork the child's first
// call opens a connection of its own; the parent's is never used by two processes.
// Every call has a deadline: none can hang on a stuck daemon.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/protocol.h"
#include "core/segment.h"
#include "core/snapshot.h"
#include "core/status.h"

namespace overmind {

// Right to load `key` natively and publish it. Lost when its holder (connection or snapshot child) dies.
struct Lease {
  Key key{};
  std::uint64_t token = 0;
};

struct Lookup {
  enum class Kind { kHit, kLease, kBusy, kAbsent };  // kAbsent: not there and no lease was asked for
  Kind kind = Kind::kAbsent;
  std::shared_ptr<Mapping> mapping;  // kHit
  Lease lease;                       // kLease
  Busy busy;                         // kBusy
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
  // Connects to nothing yet. Busy, EntryInfo and StoreStats are in protocol.h.
  explicit Client(Config config);
  ~Client();  // never blocks
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Connects now, starting the daemon when `start`. Errors: kUnavailable with the daemon's own
  // reason, kDenied (foreign or symlinked runtime folder), kTimeout, kVersion.
  Status connect(bool start);

  // With want_lease: a hit, a lease, or (after waiting up to wait_seconds for the holder) busy.
  Result<Lookup> lookup(const Key& key, bool want_lease, double wait_seconds);
  // Gives a lease back unused; the next waiter gets it. Unknown tokens are ignored.
  void abandon(const Lease& lease);

  // Counts a hit: what lookup() found was of use. Sent without waiting; lost with the connection.
  void used(EntryId id);

  // Publishes a result. Reads `sources` after returning only in the snapshot child's copy of this
  // process: the caller may change them as soon as this returns. Segments up to
  // `inline_limit` bytes are written before it returns; no child is forked for them.
  // Errors: kExhausted ("needs 9.1 GiB, budget 8 GiB, ..."), kUnavailable, kTimeout, kIo.
  Result<std::unique_ptr<Publication>> publish(const Lease& lease, const Manifest& draft,
                                               std::span<const std::byte> meta, std::span<const std::byte> skeleton,
                                               std::span<const std::byte> tensors, std::span<const Source> sources,
                                               std::uint64_t inline_limit);

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
  Impl& impl();

  Config config_;
  std::atomic<Impl*> impl_;  // of this process; a forked child makes its own and leaves the copy alone
};

}  // namespace overmind
