// SPDX-License-Identifier: MIT
// What happens in the store, for whoever wants to watch: ZeroMQ PUB on Config::events_path(), two
// frames per message (the event's name, then JSON; see PROTOCOL.md). Bytes only, never descriptors.
//
// Thread safety: none. ZeroMQ runs threads of its own, so a process that forks later must not have one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/manifest.h"

namespace overmind {

struct Event {
  std::string_view name;  // lease, publish, progress, committed, hit, evicted, dropped, failed
  EntryId id = 0;         // 0: none yet
  Key key{};
  std::string loader{}, target{};
  std::uint64_t nbytes = 0, written = 0;
  double bytes_per_second = 0;
  std::string reason{};
};

std::string to_json(const Event& event);

class EventBus {
 public:
  // Errors: kUnavailable (the address can't be bound).
  static Result<std::unique_ptr<EventBus>> bind(const std::string& path);
  ~EventBus();
  EventBus(const EventBus&) = delete;
  EventBus& operator=(const EventBus&) = delete;

  // Never blocks: a subscriber that does not keep up loses messages.
  void send(const Event& event);

 private:
  EventBus(void* context, void* socket) : context_(context), socket_(socket) {}
  void* context_;
  void* socket_;
};

}  // namespace overmind
