// SPDX-License-Identifier: MIT
#include "core/lease.h"

#include <sys/stat.h>

#include <algorithm>
#include <cassert>

#include "core/random.h"

namespace overmind {
namespace {

double seconds_between(Deadline from, Deadline to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace

std::uint64_t Snapshot::written() const {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return 0;
  return std::min(static_cast<std::uint64_t>(info.st_blocks) * 512, request.total);
}

Busy ActiveLease::progress(Deadline now) {
  Busy busy;
  busy.elapsed_seconds = seconds_between(granted, now);
  if (!snapshot) return busy;
  busy.publishing = true;
  busy.native_seconds = static_cast<double>(snapshot->request.native_ns) * 1e-9;
  busy.total = snapshot->request.total;
  busy.written = snapshot->written();
  if (busy.written > 0 && !snapshot->first_write) {
    snapshot->first_write = now;
    snapshot->before = busy.written;
  } else if (snapshot->first_write && now > *snapshot->first_write) {
    busy.bytes_per_second =
        static_cast<double>(busy.written - snapshot->before) / seconds_between(*snapshot->first_write, now);
  }
  return busy;
}

ActiveLease& LeaseTable::grant(const Key& key, ConnectionId holder, Deadline now) {
  assert(!leases_.contains(key));
  ActiveLease& lease = leases_[key];
  lease.key = key;
  lease.token = random_u64();
  lease.holder = holder;
  lease.granted = now;
  return lease;
}

ActiveLease* LeaseTable::find(const Key& key) {
  auto found = leases_.find(key);
  return found == leases_.end() ? nullptr : &found->second;
}

ActiveLease* LeaseTable::find_token(std::uint64_t token) {
  auto found = std::ranges::find_if(leases_, [token](const auto& item) { return item.second.token == token; });
  return found == leases_.end() ? nullptr : &found->second;
}

std::vector<Key> LeaseTable::held_by(ConnectionId holder) const {
  std::vector<Key> keys;
  for (const auto& [key, lease] : leases_) {
    if (lease.holder == holder) keys.push_back(key);
  }
  return keys;
}

std::list<Waiter> LeaseTable::finish(const Key& key) {
  auto found = leases_.find(key);
  if (found == leases_.end()) return {};
  std::list<Waiter> waiters = std::move(found->second.waiters);
  leases_.erase(found);
  return waiters;
}

LeaseTable::Passed LeaseTable::pass_on(const Key& key, Deadline now) {
  Passed passed;
  std::list<Waiter> waiters = finish(key);
  auto heir = std::ranges::find_if(waiters, &Waiter::wants_lease);
  if (heir == waiters.end()) {
    passed.idle = std::move(waiters);
    return passed;
  }
  passed.heir = *heir;
  waiters.erase(heir);
  ActiveLease& lease = grant(key, passed.heir->owner, now);
  lease.waiters = std::move(waiters);
  passed.token = lease.token;
  return passed;
}

bool LeaseTable::is_waiting(ConnectionId connection) const {
  return std::ranges::any_of(leases_, [connection](const auto& item) {
    return std::ranges::any_of(item.second.waiters, [&](const Waiter& w) { return w.connection == connection; });
  });
}

void LeaseTable::forget_waiter(ConnectionId connection) {
  for (auto& [key, lease] : leases_) {
    lease.waiters.remove_if([connection](const Waiter& waiter) { return waiter.connection == connection; });
  }
}

std::vector<LeaseTable::Expired> LeaseTable::take_expired(Deadline now) {
  std::vector<Expired> expired;
  for (auto& [key, lease] : leases_) {
    for (auto waiter = lease.waiters.begin(); waiter != lease.waiters.end();) {
      if (waiter->deadline > now) {
        ++waiter;
        continue;
      }
      expired.push_back({*waiter, lease.progress(now)});
      waiter = lease.waiters.erase(waiter);
    }
  }
  return expired;
}

std::optional<Deadline> LeaseTable::next_deadline() const {
  std::optional<Deadline> next;
  for (const auto& [key, lease] : leases_) {
    for (const Waiter& waiter : lease.waiters) next = next ? std::min(*next, waiter.deadline) : waiter.deadline;
  }
  return next;
}

std::vector<ActiveLease*> LeaseTable::publishing() {
  std::vector<ActiveLease*> found;
  for (auto& [key, lease] : leases_) {
    if (lease.snapshot) found.push_back(&lease);
  }
  return found;
}

std::uint64_t LeaseTable::reserved() const {
  std::uint64_t sum = 0;
  for (const auto& [key, lease] : leases_) {
    if (lease.snapshot) sum += lease.snapshot->request.total;
  }
  return sum;
}

}  // namespace overmind
