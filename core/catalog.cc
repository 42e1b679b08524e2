// SPDX-License-Identifier: MIT
#include "core/catalog.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <vector>

namespace overmind {
namespace {

constexpr double kNano = 1e-9;

// The places of an entry are at its front, but how far they reach only the manifest says: read a
// little, and more while that is not enough. 64 KiB hold 3,000 buffers.
constexpr std::uint64_t kFirstRead = 64 * 1024;
constexpr std::uint64_t kLastRead = 256 * 1024 * 1024;

Result<std::vector<std::byte>> read_head(int fd, std::uint64_t size) {
  std::vector<std::byte> head(size);
  std::uint64_t done = 0;
  while (done < size) {
    ssize_t got = ::pread(fd, head.data() + done, size - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status("read segment");
    if (got == 0) return Status(Code::kInvalid, "segment shorter than it says");
    done += static_cast<std::uint64_t>(got);
  }
  return head;
}

Result<Manifest> read_manifest(int fd, std::uint64_t size) {
  for (std::uint64_t step = kFirstRead;; step *= 16) {
    std::uint64_t part = std::min(size, step);
    Result<std::vector<std::byte>> head = read_head(fd, part);
    if (!head.ok()) return head.status();
    Result<Manifest> manifest = parse_manifest(head.value(), size);
    if (manifest.ok() || part == size || step >= kLastRead) return manifest;
  }
}

}  // namespace

EntryInfo Entry::info() const {
  return {.id = id,
          .key = key,
          .loader = loader,
          .target = target,
          .nbytes = nbytes,
          .created = static_cast<double>(created_ns) * kNano,
          .last_used = last_used,
          .native_seconds = static_cast<double>(native_ns) * kNano,
          .hits = hits,
          .mapped_by = mapped_by,
          .pinned = pinned};
}

Result<Entry> read_entry(UniqueFd fd) {
  constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
  int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) return Status(Code::kInvalid, "not a memory file");
  if ((seals & kSeals) != kSeals) return Status(Code::kInvalid, "segment is not sealed");
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_status("stat segment");
  Result<Manifest> manifest = read_manifest(fd.get(), static_cast<std::uint64_t>(info.st_size));
  if (!manifest.ok()) return manifest.status();
  Manifest& from = manifest.value();
  Entry entry;
  entry.id = from.id;
  entry.key = from.key;
  entry.nbytes = from.total_size;
  entry.created_ns = from.created_ns;
  entry.native_ns = from.native_ns;
  entry.loader = std::move(from.loader);
  entry.target = std::move(from.target);
  entry.last_used = static_cast<double>(from.created_ns) * kNano;
  entry.fd = std::move(fd);
  if (entry.id == 0) return Status(Code::kInvalid, "segment with entry id 0");
  return entry;
}

const Entry* Catalog::find(const Key& key) const {
  auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : find(found->second);
}

const Entry* Catalog::find(EntryId id) const {
  auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : &found->second;
}

const Entry& Catalog::put(Entry entry) {
  assert(find(entry.id) == nullptr && find(entry.key) == nullptr && entry.mapped_by == 0);
  by_key_[entry.key] = entry.id;
  EntryId id = entry.id;
  return entries_.emplace(id, std::move(entry)).first->second;
}

bool Catalog::remove(EntryId id) {
  auto found = entries_.find(id);
  if (found == entries_.end()) return false;
  const Entry& entry = found->second;
  if (entry.mapped_by > 0) ghosts_[id] = {entry.nbytes, entry.mapped_by};
  by_key_.erase(entry.key);
  entries_.erase(found);
  return true;
}

void Catalog::use(EntryId id, double now, bool hit) {
  auto found = entries_.find(id);
  if (found == entries_.end()) return;
  found->second.last_used = now;
  if (hit) ++found->second.hits;
}

bool Catalog::pin(EntryId id, bool on) {
  auto found = entries_.find(id);
  if (found == entries_.end()) return false;
  found->second.pinned = on;
  return true;
}

void Catalog::map(EntryId id) {
  if (auto found = entries_.find(id); found != entries_.end()) {
    ++found->second.mapped_by;
  } else if (auto ghost = ghosts_.find(id); ghost != ghosts_.end()) {
    ++ghost->second.mapped_by;
  }
}

void Catalog::unmap(EntryId id) {
  if (auto found = entries_.find(id); found != entries_.end()) {
    if (found->second.mapped_by > 0) --found->second.mapped_by;
  } else if (auto ghost = ghosts_.find(id); ghost != ghosts_.end()) {
    if (--ghost->second.mapped_by == 0) ghosts_.erase(ghost);
  }
}

Catalog::Bytes Catalog::bytes() const {
  Bytes bytes;
  for (const auto& [id, entry] : entries_) {
    bytes.committed += entry.nbytes;
    if (entry.pinned) bytes.pinned += entry.nbytes;
    if (entry.mapped_by > 0) bytes.mapped += entry.nbytes;
  }
  for (const auto& [id, ghost] : ghosts_) bytes.ghosts += ghost.nbytes;
  bytes.mapped += bytes.ghosts;
  return bytes;
}

}  // namespace overmind
