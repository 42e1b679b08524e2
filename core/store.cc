// SPDX-License-Identifier: MIT
#include "core/store.h"

#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <utility>

namespace overmind {
namespace {

constexpr auto kProgressEvery = std::chrono::milliseconds(200);
constexpr std::size_t kPageBytes = kMaxFrame - 1024;  // of a list reply

double wall_clock() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

Event event_of(std::string_view name, const Entry& entry) {
  return {.name = name,
          .id = entry.id,
          .key = entry.key,
          .loader = entry.loader,
          .target = entry.target,
          .nbytes = entry.nbytes,
          .written = entry.nbytes};
}

Event event_of(std::string_view name, const ActiveLease& lease) {
  Event event{.name = name, .key = lease.key};
  if (!lease.snapshot) return event;
  event.id = lease.snapshot->request.id;
  event.loader = lease.snapshot->request.loader;
  event.target = lease.snapshot->request.target;
  event.nbytes = lease.snapshot->request.total;
  return event;
}

Status no_entry(EntryId id) { return {Code::kNotFound, "no entry " + entry_id_to_string(id)}; }

}  // namespace

void Store::adopt(Entry entry) { catalog_.put(std::move(entry)); }

std::optional<Answer> Store::lookup(ConnectionId connection, ConnectionId owner, const protocol::LookupRequest& request,
                                    Deadline now) {
  if (const Entry* entry = catalog_.find(request.key)) return found(owner, *entry);
  ActiveLease* lease = leases_.find(request.key);
  if (lease == nullptr && !request.lease) return Answer{protocol::Absent{}};
  if (lease == nullptr) {
    ++misses_;
    ActiveLease& granted = leases_.grant(request.key, owner, now);
    listener_.event(event_of("lease", granted));
    return Answer{protocol::LeaseGranted{granted.token}};
  }
  if (request.wait_ms == 0) return Answer{lease->progress(now)};
  Deadline deadline = now + std::chrono::milliseconds(request.wait_ms);
  lease->waiters.push_back({connection, owner, request.lease, deadline});
  return std::nullopt;
}

Answer Store::open(ConnectionId owner, EntryId id) {
  const Entry* entry = catalog_.find(id);
  if (entry == nullptr) return {protocol::failure_of(no_entry(id))};
  return found(owner, *entry);
}

void Store::used(EntryId id) {
  const Entry* entry = catalog_.find(id);
  if (entry == nullptr) return;  // dropped meanwhile
  ++hits_;
  native_seconds_served_ += static_cast<double>(entry->native_ns) * 1e-9;
  catalog_.use(id, wall_clock(), /*hit=*/true);
  listener_.changed(*entry);
  listener_.event(event_of("hit", *entry));
}

Answer Store::found(ConnectionId owner, const Entry& entry) {
  catalog_.use(entry.id, wall_clock(), /*hit=*/false);
  mapped(owner, {entry.id});
  return {protocol::Hit{entry.id}, entry.fd.get()};
}

void Store::abandon(std::uint64_t token, Deadline now) {
  ActiveLease* lease = leases_.find_token(token);
  if (lease != nullptr && !lease->snapshot) pass_on(lease->key, now);
}

Answer Store::publish(ConnectionId connection, const protocol::Publish& request, UniqueFd segment,
                      std::uint64_t available, Deadline now) {
  ActiveLease* lease = leases_.find_token(request.token);
  if (lease == nullptr || lease->snapshot) {
    return {protocol::failure_of({Code::kNotFound, "the lease is gone; another process may load this now"})};
  }
  if (Status allowed = check_publish(request, segment.get(), available); !allowed.ok()) {
    ++refused_;
    Event event = event_of("failed", *lease);
    event.loader = request.loader;
    event.target = request.target;
    event.nbytes = request.total;
    event.reason = allowed.message();
    listener_.event(event);
    pass_on(Key(lease->key), now);
    return {protocol::failure_of(allowed)};
  }
  lease->holder = connection;
  lease->snapshot.emplace(Snapshot{request, std::move(segment), std::nullopt, 0});
  listener_.event(event_of("publish", *lease));
  return {protocol::Ok{}};
}

Status Store::check_publish(const protocol::Publish& request, int segment, std::uint64_t available) {
  struct stat info {};
  // Clients of ours send one; it arrives unless no descriptor is free for it.
  if (segment < 0) return {Code::kExhausted, "no descriptor is free: " + files_reason(limits_)};
  if (::fstat(segment, &info) != 0 || static_cast<std::uint64_t>(info.st_size) != request.total ||
      !S_ISREG(info.st_mode)) {
    return {Code::kInvalid, "publish without a segment of the announced size"};
  }
  if (request.id == 0 || catalog_.find(request.id) != nullptr)
    return {Code::kInvalid, "publish of an id that is taken"};
  Demand demand{.bytes = request.total, .reserved = leases_.reserved(), .available = available};
  for (const ActiveLease* other : leases_.publishing()) {
    if (other->snapshot->request.id == request.id) return {Code::kInvalid, "publish of an id that is taken"};
    demand.unwritten += other->snapshot->request.total - other->snapshot->written();
    ++demand.snapshots;
  }
  Result<std::vector<EntryId>> evict = make_room(catalog_, limits_, demand);
  if (!evict.ok()) return evict.status();
  bool files_are_short = excess_entries(catalog_, limits_, demand) > 0;
  std::string reason = files_are_short ? files_reason(limits_) : "room for a new entry";
  for (EntryId id : evict.value()) remove(id, "evicted", reason);
  return {};
}

Status Store::commit(ConnectionId connection) {
  std::vector<Key> keys = leases_.held_by(connection);
  ActiveLease* lease = keys.empty() ? nullptr : leases_.find(keys.front());
  if (lease == nullptr || !lease->snapshot) return {Code::kInvalid, "commit on a connection that publishes nothing"};
  const protocol::Publish& request = lease->snapshot->request;
  Result<Entry> read = read_entry(std::move(lease->snapshot->fd));
  if (!read.ok()) return read.status();
  Entry& entry = read.value();
  if (entry.key != lease->key || entry.id != request.id || entry.nbytes != request.total) {
    return {Code::kInvalid, "segment is not the one that was announced"};
  }
  entry.last_used = wall_clock();
  EntryId id = entry.id;
  std::list<Waiter> waiters = leases_.finish(Key(lease->key));
  // The newest entry of a key wins.
  if (const Entry* old = catalog_.find(entry.key)) remove(old->id, "dropped", "replaced by a newer one");
  catalog_.put(std::move(entry));
  ++published_;
  const Entry& live = *catalog_.find(id);
  listener_.added(live);
  listener_.event(event_of("committed", live));
  for (const Waiter& waiter : waiters) {
    listener_.answer(waiter.connection, found(waiter.owner, live));
  }
  return {};
}

void Store::mapped(ConnectionId owner, const std::vector<EntryId>& ids) {
  std::map<EntryId, std::uint32_t>& counts = mappings_[owner];
  for (EntryId id : ids) {
    if (counts[id]++ == 0) catalog_.map(id);
  }
}

void Store::unmapped(ConnectionId owner, const std::vector<EntryId>& ids) {
  auto counts = mappings_.find(owner);
  if (counts == mappings_.end()) return;
  for (EntryId id : ids) {
    auto count = counts->second.find(id);
    if (count == counts->second.end() || --count->second > 0) continue;
    counts->second.erase(count);
    catalog_.unmap(id);
  }
}

void Store::disconnected(ConnectionId connection, std::string_view why, Deadline now) {
  leases_.forget_waiter(connection);
  if (auto counts = mappings_.extract(connection)) {
    for (const auto& [id, count] : counts.mapped()) catalog_.unmap(id);
  }
  for (const Key& key : leases_.held_by(connection)) {
    Event event = event_of("failed", *leases_.find(key));
    event.reason = why;
    listener_.event(event);
    pass_on(key, now);
  }
}

void Store::pass_on(const Key& key, Deadline now) {
  LeaseTable::Passed passed = leases_.pass_on(Key(key), now);
  if (passed.heir) {
    ++misses_;
    listener_.event(Event{.name = "lease", .key = leases_.find_token(passed.token)->key});
    listener_.answer(passed.heir->connection, {protocol::LeaseGranted{passed.token}});
  }
  for (const Waiter& waiter : passed.idle) listener_.answer(waiter.connection, {protocol::Absent{}});
}

protocol::Entries Store::list(EntryId after) const {
  protocol::Entries page;
  std::size_t bytes = 0;
  const auto& entries = catalog_.entries();
  for (auto at = entries.upper_bound(after); at != entries.end(); ++at) {
    EntryInfo info = at->second.info();
    bytes += protocol::encoded_bound(info);
    if (bytes > kPageBytes && !page.entries.empty()) {
      page.more = true;
      break;
    }
    page.entries.push_back(std::move(info));
  }
  return page;
}

StoreStats Store::stats() const {
  Catalog::Bytes bytes = catalog_.bytes();
  StoreStats stats;
  stats.budget = limits_.budget;
  stats.reserved = leases_.reserved();
  stats.used = bytes.committed + bytes.ghosts + stats.reserved;
  stats.pinned = bytes.pinned;
  stats.mapped = bytes.mapped;
  stats.entries = catalog_.entries().size();
  stats.hits = hits_;
  stats.native_seconds_served = native_seconds_served_;
  stats.misses = misses_;
  stats.published = published_;
  stats.evicted = evicted_;
  stats.refused = refused_;
  return stats;
}

void Store::remove(EntryId id, std::string_view name, std::string_view reason) {
  const Entry* entry = catalog_.find(id);
  if (entry == nullptr) return;
  if (name == "evicted") ++evicted_;
  Event event = event_of(name, *entry);
  event.reason = reason;
  catalog_.remove(id);
  listener_.removed(id);
  listener_.event(event);
}

Status Store::drop(EntryId id) {
  if (catalog_.find(id) == nullptr) return no_entry(id);
  remove(id, "dropped", "asked for");
  return {};
}

std::uint64_t Store::drop_all() {
  std::uint64_t count = 0;
  for (; !catalog_.entries().empty(); ++count) remove(catalog_.entries().begin()->first, "dropped", "asked for");
  return count;
}

Status Store::pin(EntryId id, bool on) {
  if (!catalog_.pin(id, on)) return no_entry(id);
  listener_.changed(*catalog_.find(id));
  return {};
}

std::size_t Store::relieve_memory(std::uint64_t bytes) {
  std::vector<EntryId> evict = relieve(catalog_, bytes);
  for (EntryId id : evict) remove(id, "evicted", "the machine is short of memory");
  return evict.size();
}

void Store::tick(Deadline now) {
  for (const LeaseTable::Expired& expired : leases_.take_expired(now)) {
    listener_.answer(expired.waiter.connection, {expired.busy});
  }
  if (now < next_progress_) return;
  next_progress_ = now + kProgressEvery;
  for (ActiveLease* lease : leases_.publishing()) {
    Busy busy = lease->progress(now);
    Event event = event_of("progress", *lease);
    event.written = busy.written;
    event.bytes_per_second = busy.bytes_per_second;
    listener_.event(event);
  }
}

std::optional<Deadline> Store::next_tick() const {
  std::optional<Deadline> next = leases_.next_deadline();
  if (leases_.reserved() == 0) return next;
  return next ? std::min(*next, next_progress_) : next_progress_;
}

}  // namespace overmind
