// SPDX-License-Identifier: MIT
// Who loads what right now, and who waits for it. One lease per key: eight processes that ask for
// the same key make one native load. A lease belongs to a connection and ends with it; the first
// waiter that wants it inherits it.
// Thread safety: none; the server's loop owns it.
#pragma once

#include <list>
#include <map>
#include <optional>
#include <vector>

#include "core/protocol.h"
#include "core/unix_socket.h"

namespace overmind {

using ConnectionId = std::uint64_t;  // counts up, never used twice; 0: none

struct Waiter {
  ConnectionId connection = 0;  // gets the reply
  ConnectionId owner = 0;       // the main connection of its process: holds what it is given
  bool wants_lease = false;
  Deadline deadline;
};

// A snapshot on its way. Its memory file tells how far it is: tmpfs counts allocated blocks.
struct Snapshot {
  protocol::Publish request;
  UniqueFd fd;
  std::optional<Deadline> first_write;  // when bytes were first seen
  std::uint64_t before = 0;             // how many those were

  std::uint64_t written() const;
};

struct ActiveLease {
  Key key{};
  std::uint64_t token = 0;
  ConnectionId holder = 0;
  Deadline granted;
  std::optional<Snapshot> snapshot;
  std::list<Waiter> waiters;

  Busy progress(Deadline now);
};

class LeaseTable {
 public:
  // REQUIRES: no lease for `key`.
  ActiveLease& grant(const Key& key, ConnectionId holder, Deadline now);
  ActiveLease* find(const Key& key);
  ActiveLease* find_token(std::uint64_t token);
  // The leases of a connection that goes away.
  std::vector<Key> held_by(ConnectionId holder) const;

  // Ends the lease for good and returns who waited.
  std::list<Waiter> finish(const Key& key);
  // The holder gave up. The heir, if any, holds a new lease; else `idle` waited for others to load,
  // which nobody does any more.
  struct Passed {
    std::optional<Waiter> heir;
    std::uint64_t token = 0;
    std::list<Waiter> idle;
  };
  Passed pass_on(const Key& key, Deadline now);

  bool is_waiting(ConnectionId connection) const;
  void forget_waiter(ConnectionId connection);
  struct Expired {
    Waiter waiter;
    Busy busy;
  };
  std::vector<Expired> take_expired(Deadline now);
  std::optional<Deadline> next_deadline() const;

  std::vector<ActiveLease*> publishing();
  std::uint64_t reserved() const;  // bytes of all snapshots on their way

 private:
  std::map<Key, ActiveLease> leases_;
};

}  // namespace overmind
