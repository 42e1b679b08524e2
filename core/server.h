// SPDX-License-Identifier: MIT
// The daemon's one thread: an epoll loop over connections, their processes, the keeper, signals and
// memory pressure. Decodes requests, asks the Store, sends what it answers.
//
// Nobody can hold up anybody: sockets never block, what a client does not read is queued up to a
// bound and then its connection is closed, as it is for anything malformed. The number of connections is
// bounded. Only processes of the same user get in.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "core/config.h"
#include "core/keeper.h"
#include "core/unique_fd.h"

namespace overmind {

struct ServerSetup {
  Config config;
  std::uint64_t budget = 0;  // bytes
  int listener = -1;         // stays the caller's
  UniqueFd keeper;           // this end; may be absent
  KeptEntries kept;          // what an earlier server had committed
  // Starts a new keeper and gives this end of its socket; called when the old one died.
  std::function<UniqueFd()> start_keeper;
  std::function<void(const Status&)> ready;  // called once, before the first client is served
};

// Serves until a client says stop, SIGTERM arrives (blocked by the caller) or nobody came for
// config.idle_exit_seconds. Errors: kIo, kExhausted: it can't serve at all.
Status serve(ServerSetup setup);

}  // namespace overmind
