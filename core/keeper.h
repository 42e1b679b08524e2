// SPDX-License-Identifier: MIT
// Why `kill -9` loses nothing: two processes hold every committed segment and the listening socket.
// The server serves; the keeper does nothing but hold and watch. When the server dies the keeper forks
// a new one, which reads its catalog from the segments. When the keeper dies the server starts a new one
// (a fresh program: the server has ZeroMQ's threads, so it must not fork) and sends it everything.
// The instance lock is an open file that both share, so it is free only when both are gone.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "core/catalog.h"
#include "core/unix_socket.h"

namespace overmind {

// One message from the server to its keeper; both are the same program, so the struct is the format.
struct KeeperMessage {
  enum class Op : std::uint32_t {
    kKeep,  // with the descriptor
    kMark,  // pin, use
    kForget,
    kBye,  // the server ends on purpose
  };
  Op op;
  std::uint32_t pinned;
  EntryId id;
  std::uint64_t hits;
  double last_used;
};

struct Kept {
  UniqueFd fd;
  bool pinned = false;
  std::uint64_t hits = 0;
  double last_used = 0;
};
using KeptEntries = std::map<EntryId, Kept>;

// The server's end. What can't be sent now is sent later: the server never waits for its keeper.
// Thread safety: none.
class KeeperLink {
 public:
  explicit KeeperLink(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }  // -1: no keeper
  void attach(UniqueFd socket, const Catalog& catalog);
  void detach();

  void keep(const Entry& entry, const Catalog& catalog) { push(KeeperMessage::Op::kKeep, entry.id, catalog); }
  void mark(const Entry& entry, const Catalog& catalog);
  void forget(EntryId id, const Catalog& catalog) { push(KeeperMessage::Op::kForget, id, catalog); }
  void bye();
  // Sends what waits; call when the socket can be written.
  void flush(const Catalog& catalog);
  bool wants_write() const { return !queue_.empty(); }

 private:
  struct Item {
    KeeperMessage::Op op;
    EntryId id;
  };
  void push(KeeperMessage::Op op, EntryId id, const Catalog& catalog);

  UniqueFd socket_;
  std::deque<Item> queue_;
};

// Refuses a sixth start within ten seconds: something is wrong that another start won't mend.
class RestartGuard {
 public:
  bool allow(Deadline now);

 private:
  std::deque<Deadline> starts_;
};

// What a server process does with its end of the socket and what was kept; its result is the exit code.
using StartServer = std::function<int(UniqueFd socket, KeptEntries kept)>;

struct StartedServer {
  UniqueFd socket;  // the keeper's end
  int pid = 0;
};

// Forks. Does not return in the child, which exits with what `serve` gives. Nothing when no process can be had.
std::optional<StartedServer> start_server(const StartServer& serve, KeptEntries kept);

enum class KeeperEnd { kStopped, kGaveUp };

// Watches `server` and those that follow it until one ends on purpose or SIGTERM arrives (blocked by the
// caller). Does not return in a server process.
KeeperEnd keep(StartedServer server, const StartServer& serve);

}  // namespace overmind
