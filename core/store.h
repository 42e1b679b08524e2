// SPDX-License-Identifier: MIT
// The decisions of the daemon, without sockets: what a lookup gets, whether a snapshot has room,
// whether a commit is right, who is woken. server.h connects it with clients, keeper and event bus.
//
// A process is known by its main connection (`owner`): it holds the leases and mappings. Replies that
// are due at once are returned; replies to connections that waited go through the Listener.
// Thread safety: none; the server's loop owns it. Listener calls must not come back into the Store.
#pragma once

#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "core/budget.h"
#include "core/catalog.h"
#include "core/event_bus.h"
#include "core/lease.h"
#include "core/protocol.h"

namespace overmind {

// A reply and the descriptor that travels with it (-1: none; owned by the catalog).
struct Answer {
  protocol::Reply reply;
  int fd = -1;
};

class StoreListener {
 public:
  virtual ~StoreListener() = default;
  virtual void answer(ConnectionId to, const Answer& answer) = 0;
  virtual void event(const Event& event) = 0;
  // What survives the server: the entry was added, changed (pin, use), removed.
  virtual void added(const Entry& entry) = 0;
  virtual void changed(const Entry& entry) = 0;
  virtual void removed(EntryId id) = 0;
};

class Store {
 public:
  Store(Limits limits, StoreListener& listener) : limits_(limits), listener_(listener) {}

  // Takes an entry that an earlier server had committed.
  void adopt(Entry entry);

  // No answer: the connection waits, and gets one through the Listener.
  std::optional<Answer> lookup(ConnectionId connection, ConnectionId owner, const protocol::LookupRequest& request,
                               Deadline now);
  Answer open(ConnectionId owner, EntryId id);
  void abandon(std::uint64_t token, Deadline now);  // unknown tokens are ignored

  // Moves the lease to `connection`. `available`: memory the machine can give, bytes. A refusal ends the lease.
  Answer publish(ConnectionId connection, const protocol::Publish& request, UniqueFd segment, std::uint64_t available,
                 Deadline now);
  // Errors: kInvalid; the connection has to be closed then, which passes its lease on.
  Status commit(ConnectionId connection);

  void used(EntryId id);  // a hit; ignored if the entry is gone
  void mapped(ConnectionId owner, const std::vector<EntryId>& ids);
  void unmapped(ConnectionId owner, const std::vector<EntryId>& ids);
  // Leases, mappings and waits of a connection that is gone.
  void disconnected(ConnectionId connection, std::string_view why, Deadline now);
  bool is_waiting(ConnectionId connection) const { return leases_.is_waiting(connection); }

  protocol::Entries list(EntryId after) const;
  StoreStats stats() const;  // without the fields that describe the process
  Status drop(EntryId id);   // kNotFound
  std::uint64_t drop_all();
  Status pin(EntryId id, bool on);  // kNotFound

  // Evicts what nobody maps until `bytes` are given back. Returns how many entries went.
  std::size_t relieve_memory(std::uint64_t bytes);

  // Answers waits that are over. Reports progress, at most five times a second.
  void tick(Deadline now);
  std::optional<Deadline> next_tick() const;

  const Catalog& catalog() const { return catalog_; }
  const Limits& limits() const { return limits_; }

 private:
  Answer found(ConnectionId owner, const Entry& entry);
  Status check_publish(const protocol::Publish& request, int segment, std::uint64_t available);
  void pass_on(const Key& key, Deadline now);
  void remove(EntryId id, std::string_view event, std::string_view reason);

  Limits limits_;
  StoreListener& listener_;
  Catalog catalog_;
  LeaseTable leases_;
  std::map<ConnectionId, std::map<EntryId, std::uint32_t>> mappings_;  // by owner; how often
  std::uint64_t hits_ = 0, misses_ = 0, published_ = 0, evicted_ = 0, refused_ = 0;
  double native_seconds_served_ = 0;
  Deadline next_progress_{};
};

}  // namespace overmind
