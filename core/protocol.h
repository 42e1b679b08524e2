// SPDX-License-Identifier: MIT
// What clients and the daemon say to each other: plain request and reply types, and their bytes.
// No I/O here; PROTOCOL.md tells the story, unix_socket.h moves the frames.
//
// One message is one CBOR map: "op" names the type, the other keys are its fields, all of them
// always present. Decoding is strict: an unknown op, a missing, additional or mistyped field, or a
// map nested deeper than a reply needs is kInvalid. `fields` is the one list of a type's fields that
// both encoding and decoding use.
// Thread safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/manifest.h"
#include "core/status.h"

namespace overmind {

constexpr std::size_t kMaxFrame = 64 * 1024;  // bytes of one message; a longer one closes the connection
constexpr std::size_t kMaxIds = 4096;         // ids in one message

// What another process does with the key right now.
struct Busy {
  static constexpr std::string_view kOp = "busy";
  bool publishing = false;      // false: it is still loading natively
  double elapsed_seconds = 0;   // since the lease was granted
  double native_seconds = 0;    // how long its native load took; 0 while unknown
  std::uint64_t written = 0;    // bytes of the segment so far
  std::uint64_t total = 0;      // bytes of the segment; 0 while unknown
  double bytes_per_second = 0;  // 0 while unknown
  void fields(auto&& visit) {
    visit("publishing", publishing);
    visit("elapsed_seconds", elapsed_seconds);
    visit("native_seconds", native_seconds);
    visit("written", written);
    visit("total", total);
    visit("bytes_per_second", bytes_per_second);
  }
};

struct EntryInfo {
  EntryId id = 0;
  Key key{};
  std::string loader, target;
  std::uint64_t nbytes = 0;
  double created = 0, last_used = 0;  // seconds since the epoch
  double native_seconds = 0;
  std::uint64_t hits = 0;
  std::uint32_t mapped_by = 0;  // live processes that hold a mapping
  bool pinned = false;
  void fields(auto&& visit) {
    visit("id", id);
    visit("key", key);
    visit("loader", loader);
    visit("target", target);
    visit("nbytes", nbytes);
    visit("created", created);
    visit("last_used", last_used);
    visit("native_seconds", native_seconds);
    visit("hits", hits);
    visit("mapped_by", mapped_by);
    visit("pinned", pinned);
  }
};

struct StoreStats {
  static constexpr std::string_view kOp = "stats";
  std::uint64_t budget = 0, used = 0, pinned = 0, mapped = 0, reserved = 0;  // bytes
  std::uint64_t entries = 0, hits = 0, misses = 0, published = 0, evicted = 0, refused = 0;
  double uptime_seconds = 0;
  double native_seconds_served = 0;              // what the hits would have taken natively
  std::uint64_t daemon_pid = 0, daemon_rss = 0;  // rss without segments, bytes
  std::string version;
  void fields(auto&& visit) {
    visit("budget", budget);
    visit("used", used);
    visit("pinned", pinned);
    visit("mapped", mapped);
    visit("reserved", reserved);
    visit("entries", entries);
    visit("hits", hits);
    visit("misses", misses);
    visit("published", published);
    visit("evicted", evicted);
    visit("refused", refused);
    visit("uptime_seconds", uptime_seconds);
    visit("native_seconds_served", native_seconds_served);
    visit("daemon_pid", daemon_pid);
    visit("daemon_rss", daemon_rss);
    visit("version", version);
  }
};

namespace protocol {

// ---- requests; the reply of each is named in brackets

// First message of every connection [HelloReply, Failure]. `client` is random, made anew for each main
// connection; a second connection of the same process says it again and joins the first one's account
// of leases and mappings. `mapped`: what a main connection maps already (after the daemon's restart).
struct Hello {
  static constexpr std::string_view kOp = "hello";
  std::uint32_t version = 0;
  std::uint64_t client = 0;
  bool main = false;
  std::vector<EntryId> mapped;
  void fields(auto&& visit) {
    visit("version", version);
    visit("client", client);
    visit("main", main);
    visit("mapped", mapped);
  }
};

// Is `key` there? [Hit + descriptor, LeaseGranted, Busy, Absent], at the latest after wait_ms.
struct LookupRequest {
  static constexpr std::string_view kOp = "lookup";
  Key key{};
  bool lease = false;  // a miss asks for the right to load and publish
  std::uint32_t wait_ms = 0;
  void fields(auto&& visit) {
    visit("key", key);
    visit("lease", lease);
    visit("wait_ms", wait_ms);
  }
};

// Gives a lease back; the next waiter gets it [none].
struct Abandon {
  static constexpr std::string_view kOp = "abandon";
  std::uint64_t token = 0;
  void fields(auto&& visit) { visit("token", token); }
};

// Reserves room for a segment, whose descriptor comes along [Ok, Failure]. From here on the
// connection stands for this snapshot: its end without a commit gives room and lease back.
struct Publish {
  static constexpr std::string_view kOp = "publish";
  std::uint64_t token = 0;
  EntryId id = 0;
  std::uint64_t total = 0;
  std::uint64_t native_ns = 0;
  std::string loader, target;
  void fields(auto&& visit) {
    visit("token", token);
    visit("id", id);
    visit("total", total);
    visit("native_ns", native_ns);
    visit("loader", loader);
    visit("target", target);
  }
};

// The segment of this connection is written and sealed [Ok; the connection closes if it is not right].
struct Commit {
  static constexpr std::string_view kOp = "commit";
  void fields(auto&&) {}
};

// What a lookup found was of use: a hit [none]. Only the client knows: it looks at the dependencies.
struct Used {
  static constexpr std::string_view kOp = "used";
  EntryId id = 0;
  void fields(auto&& visit) { visit("id", id); }
};

// This process unmapped these, one mapping each [none].
struct Unmapped {
  static constexpr std::string_view kOp = "unmapped";
  std::vector<EntryId> ids;
  void fields(auto&& visit) { visit("ids", ids); }
};

// Entries with an id greater than `after`, ascending, as many as fit [Entries].
struct ListRequest {
  static constexpr std::string_view kOp = "list";
  EntryId after = 0;
  void fields(auto&& visit) { visit("after", after); }
};

// Numbers of the store [StoreStats].
struct StatsRequest {
  static constexpr std::string_view kOp = "stats";
  void fields(auto&&) {}
};

// The segment of one entry, by id; does not count as a hit [Hit + descriptor, Failure].
struct OpenRequest {
  static constexpr std::string_view kOp = "open";
  EntryId id = 0;
  void fields(auto&& visit) { visit("id", id); }
};

// Forgets one entry [Ok, Failure].
struct Drop {
  static constexpr std::string_view kOp = "drop";
  EntryId id = 0;
  void fields(auto&& visit) { visit("id", id); }
};

// Forgets every entry, the pinned ones too [Dropped].
struct DropAll {
  static constexpr std::string_view kOp = "drop_all";
  void fields(auto&&) {}
};

// A pinned entry is never evicted [Ok, Failure].
struct Pin {
  static constexpr std::string_view kOp = "pin";
  EntryId id = 0;
  bool on = false;
  void fields(auto&& visit) {
    visit("id", id);
    visit("on", on);
  }
};

// Ends the daemon and forgets everything [Ok].
struct Stop {
  static constexpr std::string_view kOp = "stop";
  void fields(auto&&) {}
};

// ---- replies

// Welcome; the daemon's package version, for people.
struct HelloReply {
  static constexpr std::string_view kOp = "welcome";
  std::uint32_t version = 0;
  std::string package;
  void fields(auto&& visit) {
    visit("version", version);
    visit("package", package);
  }
};

// The entry's sealed segment travels with this message.
struct Hit {
  static constexpr std::string_view kOp = "hit";
  EntryId id = 0;
  void fields(auto&& visit) { visit("id", id); }
};

// You load it.
struct LeaseGranted {
  static constexpr std::string_view kOp = "lease";
  std::uint64_t token = 0;
  void fields(auto&& visit) { visit("token", token); }
};

// Not there, and no lease was asked for.
struct Absent {
  static constexpr std::string_view kOp = "absent";
  void fields(auto&&) {}
};

// Done.
struct Ok {
  static constexpr std::string_view kOp = "ok";
  void fields(auto&&) {}
};

// Not done; `code` is a code_name() of status.h.
struct Failure {
  static constexpr std::string_view kOp = "failure";
  std::string code, message;
  void fields(auto&& visit) {
    visit("code", code);
    visit("message", message);
  }
};

// One page of the catalog; `more`: ask again after the last id.
struct Entries {
  static constexpr std::string_view kOp = "entries";
  std::vector<EntryInfo> entries;
  bool more = false;
  void fields(auto&& visit) {
    visit("entries", entries);
    visit("more", more);
  }
};

// How many entries were forgotten.
struct Dropped {
  static constexpr std::string_view kOp = "dropped";
  std::uint64_t count = 0;
  void fields(auto&& visit) { visit("count", count); }
};

using Request = std::variant<Hello, LookupRequest, Abandon, Publish, Commit, Used, Unmapped, ListRequest, StatsRequest,
                             OpenRequest, Drop, DropAll, Pin, Stop>;
using Reply = std::variant<HelloReply, Hit, LeaseGranted, Busy, Absent, Ok, Failure, Entries, StoreStats, Dropped>;

std::vector<std::byte> encode(const Request& request);
std::vector<std::byte> encode(const Reply& reply);
// Errors: kInvalid, naming what is wrong. Never throws for content, never recurses with it.
Result<Request> decode_request(std::span<const std::byte> frame);
Result<Reply> decode_reply(std::span<const std::byte> frame);

// Bytes that `entry` takes in an Entries message, rounded up.
std::size_t encoded_bound(const EntryInfo& entry);

Failure failure_of(const Status& status);
Status status_of(const Failure& failure);

}  // namespace protocol
}  // namespace overmind
