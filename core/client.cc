// SPDX-License-Identifier: MIT
#include "core/client.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/random.h"
#include "core/spawn.h"
#include "core/unix_socket.h"

namespace overmind {
namespace {

constexpr double kRequestSeconds = 5;
constexpr double kMaxWaitSeconds = 24 * 3600;
constexpr std::size_t kIdsPerMessage = 1024;

Status unexpected() { return {Code::kInvalid, "the daemon gave an answer that does not fit the question"}; }

// One connection, from hello to its end.
class Connection {
 public:
  static Result<Connection> open(const Config& config, bool start, const protocol::Hello& hello) {
    Result<UniqueFd> fd = connect_daemon(config, start);
    if (!fd.ok()) return fd.status();
    Connection connection(std::move(fd).value());
    Result<protocol::Reply> reply = connection.ask(hello, kRequestSeconds);
    if (!reply.ok()) return reply.status();
    if (std::holds_alternative<protocol::HelloReply>(reply.value())) return connection;
    if (const auto* failure = std::get_if<protocol::Failure>(&reply.value())) return protocol::status_of(*failure);
    return unexpected();
  }

  int fd() const { return fd_.get(); }

  // Whether the daemon still has its end, as far as the kernel knows; nothing is under way on it. 1 us; to ask the
  // daemon itself takes 0.1 to 0.4 ms, which a process's first hit would wait for.
  bool stands() const {
    pollfd end{.fd = fd_.get(), .events = POLLIN | POLLRDHUP, .revents = 0};
    return ::poll(&end, 1, 0) == 0;
  }

  UniqueFd take_attached() { return std::move(attached_); }

  Status tell(const protocol::Request& request, int attached = -1) {
    return send_by(fd_.get(), protocol::encode(request), attached, deadline_in(kRequestSeconds));
  }

  // Errors: kUnavailable (the connection is gone), kTimeout, kInvalid, kIo. A Failure is a reply.
  Result<protocol::Reply> ask(const protocol::Request& request, double seconds, int attached = -1) {
    if (Status sent = tell(request, attached); !sent.ok()) return sent;
    Result<Frame> frame = receive_by(fd_.get(), *buffer_, deadline_in(seconds));
    if (!frame.ok()) return frame.status();
    attached_ = std::move(frame.value().fd);
    return protocol::decode_reply(frame.value().bytes);
  }

 private:
  explicit Connection(UniqueFd fd) : fd_(std::move(fd)), buffer_(std::make_unique_for_overwrite<FrameBuffer>()) {}
  UniqueFd fd_;
  UniqueFd attached_;  // came with the last reply
  std::unique_ptr<FrameBuffer> buffer_;
};

// The reply as T, or why it is not one.
template <typename T>
Result<T> expect(Result<protocol::Reply> reply) {
  if (!reply.ok()) return reply.status();
  if (auto* value = std::get_if<T>(&reply.value())) return std::move(*value);
  if (const auto* failure = std::get_if<protocol::Failure>(&reply.value())) return protocol::status_of(*failure);
  return unexpected();
}

Status status_only(const Result<protocol::Ok>& reply) { return reply.status(); }

std::uint64_t wall_clock_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

// Everything of one process. A fork may copy it with locks held, so the child never touches its copy
// but for closing the socket.
class Client::Impl {
 public:
  explicit Impl(const Config& config) : config_(config) {}

  const pid_t pid = ::getpid();

  Status connect(bool start) {
    std::lock_guard lock(mutex_);
    start_ = start_ || start;
    if (connection_) {
      if (connection_->stands()) return {};  // the daemon may have been stopped since
      close();
    }
    return connect_locked();
  }

  // Asks on the main connection, once more on a new one when the daemon went away in between.
  Result<protocol::Reply> ask(const protocol::Request& request, UniqueFd* attached = nullptr) {
    std::lock_guard lock(mutex_);
    bool is_new = !connection_;
    if (Status connected = connect_locked(); !connected.ok()) return connected;
    Result<protocol::Reply> reply = ask_once(request, kRequestSeconds);
    if (!reply.ok() && reply.status().code() == Code::kUnavailable && !is_new) {
      close();
      if (Status connected = connect_locked(); !connected.ok()) return connected;
      reply = ask_once(request, kRequestSeconds);
    }
    if (!reply.ok()) {
      close();  // a late answer must not be taken for the next one's
    } else if (attached != nullptr) {
      *attached = connection_->take_attached();
    }
    return reply;
  }

  // Without waiting for an answer; a lost connection has lost what this was about.
  void tell(const protocol::Request& request) {
    std::lock_guard lock(mutex_);
    if (connection_ && !connection_->tell(request).ok()) close();
  }

  // A further connection of this process, for a call that takes long.
  Result<Connection> open_second() {
    std::uint64_t name = 0;
    {
      std::lock_guard lock(mutex_);
      if (Status connected = connect_locked(); !connected.ok()) return connected;
      name = name_;
    }
    return Connection::open(config_, false, hello(name, /*main=*/false));
  }

  void note_mapped(EntryId id) {
    std::lock_guard lock(mapped_mutex_);
    ++mapped_[id];
  }

  void note_unmapped(EntryId id) {
    std::lock_guard lock(mapped_mutex_);
    auto found = mapped_.find(id);
    if (found == mapped_.end()) return;  // of a parent process
    if (--found->second == 0) mapped_.erase(found);
    unmapped_.push_back(id);
  }

  // Ends the connection without any lock: for the copy in a forked child.
  void close_copy() {
    if (int fd = socket_.exchange(-1); fd >= 0) ::close(fd);
  }

  void close_all() {
    std::lock_guard lock(mutex_);
    close();
  }

 private:
  static protocol::Hello hello(std::uint64_t name, bool main) {
    return {.version = static_cast<std::uint32_t>(kProtocolVersion), .client = name, .main = main, .mapped = {}};
  }

  Status connect_locked() {
    if (connection_) return {};
    protocol::Hello greeting = hello(random_u64(), /*main=*/true);
    {
      std::lock_guard lock(mapped_mutex_);
      unmapped_.clear();  // the new account starts with what is mapped now
      for (const auto& [id, count] : mapped_) {
        for (std::uint32_t i = 0; i < count && greeting.mapped.size() < kMaxIds; ++i) greeting.mapped.push_back(id);
      }
    }
    Result<Connection> opened = Connection::open(config_, start_, greeting);
    if (!opened.ok()) return opened.status();
    connection_.emplace(std::move(opened).value());
    socket_ = connection_->fd();
    name_ = greeting.client;
    return {};
  }

  Result<protocol::Reply> ask_once(const protocol::Request& request, double seconds) {
    for (;;) {
      protocol::Unmapped gone;
      {
        std::lock_guard lock(mapped_mutex_);
        auto part = unmapped_.begin() + static_cast<std::ptrdiff_t>(std::min(unmapped_.size(), kIdsPerMessage));
        gone.ids.assign(unmapped_.begin(), part);
        unmapped_.erase(unmapped_.begin(), part);
      }
      if (gone.ids.empty()) return connection_->ask(request, seconds);
      if (Status told = connection_->tell(gone); !told.ok()) return told;
    }
  }

  void close() {
    socket_ = -1;
    connection_.reset();
  }

  const Config config_;
  std::mutex mutex_;  // protects what follows
  bool start_ = false;
  std::optional<Connection> connection_;
  std::uint64_t name_ = 0;
  std::atomic<int> socket_{-1};  // of connection_

  std::mutex mapped_mutex_;  // protects what follows; never held while waiting
  std::map<EntryId, std::uint32_t> mapped_;
  std::vector<EntryId> unmapped_;
};

// ---- Publication

Publication::State Publication::wait(double seconds) {
  if (state_ != State::kRunning) return state_;
  Status ready = wait_for(done_.get(), POLLIN, deadline_in(std::clamp(seconds, 0.0, kMaxWaitSeconds)));
  if (ready.code() == Code::kTimeout) return state_;
  SnapshotStatus report{};
  ssize_t got;
  do {
    got = ::read(done_.get(), &report, sizeof(report));
  } while (got < 0 && errno == EINTR);
  done_.reset();
  failure_ = got == sizeof(report) ? to_status(report)
                                   : Status(Code::kUnavailable, "the process that wrote the snapshot was killed");
  state_ = failure_.ok() ? State::kCommitted : State::kFailed;
  return state_;
}

// ---- Client

Client::Client(Config config) : config_(std::move(config)), impl_(new Impl(config_)) {}

// The other process's copy may hold locked mutexes; it is left alone, and is not much.
Client::~Client() {
  Impl* mine = impl_.load();
  if (mine->pid == ::getpid()) {
    delete mine;
  } else {
    mine->close_copy();
  }
}

Client::Impl& Client::impl() {
  Impl* current = impl_.load();
  if (current->pid == ::getpid()) return *current;
  auto fresh = std::make_unique<Impl>(config_);
  if (!impl_.compare_exchange_strong(current, fresh.get())) return *current;  // another thread of the child did
  current->close_copy();
  return *fresh.release();
}

Status Client::connect(bool start) { return impl().connect(start); }

namespace {

// What a reply to a lookup or an open says, once its segment is mapped.
Result<Lookup> lookup_of(const Key& key, Result<protocol::Reply> reply, const UniqueFd& segment) {
  if (!reply.ok()) return reply.status();
  Lookup lookup;
  if (std::holds_alternative<protocol::Hit>(reply.value())) {
    if (!segment.valid()) return Status(Code::kExhausted, "the segment did not arrive: no descriptor free (ulimit -n)");
    Result<std::shared_ptr<Mapping>> mapping = Mapping::map(segment.get());
    if (!mapping.ok()) return mapping.status();
    lookup.kind = Lookup::Kind::kHit;
    lookup.mapping = std::move(mapping).value();
  } else if (const auto* granted = std::get_if<protocol::LeaseGranted>(&reply.value())) {
    lookup.kind = Lookup::Kind::kLease;
    lookup.lease = {key, granted->token};
  } else if (const auto* busy = std::get_if<Busy>(&reply.value())) {
    lookup.kind = Lookup::Kind::kBusy;
    lookup.busy = *busy;
  } else if (const auto* failure = std::get_if<protocol::Failure>(&reply.value())) {
    return protocol::status_of(*failure);
  } else if (!std::holds_alternative<protocol::Absent>(reply.value())) {
    return unexpected();
  }
  return lookup;
}

std::optional<EntryId> hit_id(const Result<protocol::Reply>& reply) {
  if (!reply.ok()) return std::nullopt;
  const auto* hit = std::get_if<protocol::Hit>(&reply.value());
  return hit == nullptr ? std::nullopt : std::optional(hit->id);
}

}  // namespace

Result<Lookup> Client::lookup(const Key& key, bool want_lease, double wait_seconds) {
  Impl& mine = impl();
  protocol::LookupRequest request{.key = key, .lease = want_lease, .wait_ms = 0};
  UniqueFd segment;
  Result<protocol::Reply> reply = mine.ask(request, &segment);
  if (reply.ok() && std::holds_alternative<Busy>(reply.value()) && wait_seconds > 0) {
    double wait = std::min(wait_seconds, kMaxWaitSeconds);
    request.wait_ms = static_cast<std::uint32_t>(std::ceil(wait * 1000));
    Result<Connection> second = mine.open_second();
    if (!second.ok()) return second.status();
    reply = second.value().ask(request, wait + kRequestSeconds);
    segment = second.value().take_attached();
  }
  std::optional<EntryId> hit = hit_id(reply);
  if (hit) mine.note_mapped(*hit);  // the daemon counts it from here on, whatever comes of it
  Result<Lookup> lookup = lookup_of(key, std::move(reply), segment);
  if (hit && !lookup.ok()) mine.note_unmapped(*hit);
  if (lookup.ok() && hit &&
      (lookup.value().mapping->manifest().id != *hit || lookup.value().mapping->manifest().key != key)) {
    mine.note_unmapped(*hit);
    return unexpected();
  }
  return lookup;
}

void Client::abandon(const Lease& lease) { impl().tell(protocol::Abandon{lease.token}); }

namespace {

// Asks for room; the connection then stands for the snapshot.
Status reserve(Connection& connection, const Lease& lease, const Manifest& manifest, const SegmentPlan& plan,
               int segment) {
  protocol::Publish request{.token = lease.token,
                            .id = manifest.id,
                            .total = plan.total_size,
                            .native_ns = manifest.native_ns,
                            .loader = manifest.loader,
                            .target = manifest.target};
  return status_only(expect<protocol::Ok>(connection.ask(request, kRequestSeconds, segment)));
}

Status publish_here(Connection& connection, const SegmentPlan& plan, std::span<const Source> sources, int segment) {
  if (Status written = write_segment(segment, plan, sources); !written.ok()) return written;
  if (Status sealed = seal_segment(segment); !sealed.ok()) return sealed;
  Status committed = status_only(expect<protocol::Ok>(connection.ask(protocol::Commit{}, kRequestSeconds)));
  if (committed.code() == Code::kUnavailable) {
    return {Code::kUnavailable, "the daemon refused the snapshot or ended; its log says why"};
  }
  return committed;
}

}  // namespace

Result<std::unique_ptr<Publication>> Client::publish(const Lease& lease, const Manifest& draft,
                                                     std::span<const std::byte> meta,
                                                     std::span<const std::byte> skeleton,
                                                     std::span<const std::byte> tensors,
                                                     std::span<const Source> sources, std::uint64_t inline_limit) {
  Manifest manifest = draft;
  manifest.key = lease.key;
  manifest.id = random_u64();
  if (manifest.created_ns == 0) manifest.created_ns = wall_clock_ns();
  auto publication = std::make_unique<Publication>();
  publication->id_ = manifest.id;

  auto attempt = [&]() -> Status {
    Result<SegmentPlan> plan = plan_segment_of(manifest, meta, skeleton, tensors, sources);
    if (!plan.ok()) return plan.status();
    Result<UniqueFd> segment = create_segment("overmind", plan.value().total_size);
    if (!segment.ok()) return segment.status();
    int fd = segment.value().get();
    Result<Connection> connection = impl().open_second();
    if (!connection.ok()) return connection.status();
    Status reserved = reserve(connection.value(), lease, manifest, plan.value(), fd);
    if (!reserved.ok()) return reserved;
    if (plan.value().total_size <= inline_limit) {
      publication->state_ = Publication::State::kCommitted;
      return publish_here(connection.value(), plan.value(), sources, fd);
    }
    std::vector<std::byte> commit = protocol::encode(protocol::Request(protocol::Commit{}));
    Result<UniqueFd> done = fork_snapshot({fd, &plan.value(), sources, connection.value().fd(), commit});
    if (!done.ok()) return done.status();
    publication->done_ = std::move(done).value();
    return {};
  };
  if (Status status = attempt(); !status.ok()) {
    abandon(lease);  // where the daemon has not given it up already
    return status;
  }
  return publication;
}

void Client::used(EntryId id) { impl().tell(protocol::Used{id}); }

void Client::unmapped(EntryId id) { impl().note_unmapped(id); }

Result<std::vector<EntryInfo>> Client::list() {
  std::vector<EntryInfo> all;
  EntryId after = 0;
  for (;;) {
    Result<protocol::Entries> page = expect<protocol::Entries>(impl().ask(protocol::ListRequest{after}));
    if (!page.ok()) return page.status();
    std::vector<EntryInfo>& entries = page.value().entries;
    if (entries.empty()) return all;
    if (entries.back().id <= after) return unexpected();  // would never end
    after = entries.back().id;
    std::ranges::move(entries, std::back_inserter(all));
    if (!page.value().more) return all;
  }
}

Result<StoreStats> Client::stats() { return expect<StoreStats>(impl().ask(protocol::StatsRequest{})); }

Result<std::shared_ptr<Mapping>> Client::open(EntryId id) {
  Impl& mine = impl();
  UniqueFd segment;
  Result<protocol::Reply> reply = mine.ask(protocol::OpenRequest{id}, &segment);
  std::optional<EntryId> hit = hit_id(reply);
  if (hit) mine.note_mapped(*hit);
  Result<Lookup> lookup = lookup_of(Key{}, std::move(reply), segment);
  if (hit && !lookup.ok()) mine.note_unmapped(*hit);
  if (!lookup.ok()) return lookup.status();
  if (lookup.value().kind != Lookup::Kind::kHit) return unexpected();
  return std::move(lookup.value().mapping);
}

Status Client::drop(EntryId id) { return status_only(expect<protocol::Ok>(impl().ask(protocol::Drop{id}))); }

Result<std::uint64_t> Client::drop_all() {
  Result<protocol::Dropped> dropped = expect<protocol::Dropped>(impl().ask(protocol::DropAll{}));
  if (!dropped.ok()) return dropped.status();
  return dropped.value().count;
}

Status Client::pin(EntryId id, bool pinned) {
  return status_only(expect<protocol::Ok>(impl().ask(protocol::Pin{id, pinned})));
}

// On a connection of its own, which never starts a daemon.
Status Client::stop() {
  impl().close_all();
  protocol::Hello hello{
      .version = static_cast<std::uint32_t>(kProtocolVersion), .client = random_u64(), .main = true, .mapped = {}};
  Result<Connection> connection = Connection::open(config_, /*start=*/false, hello);
  if (!connection.ok()) return connection.status().code() == Code::kUnavailable ? Status() : connection.status();
  Status stopped = status_only(expect<protocol::Ok>(connection.value().ask(protocol::Stop{}, kRequestSeconds)));
  if (!stopped.ok() && stopped.code() != Code::kUnavailable) return stopped;
  return wait_until_gone(config_, deadline_in(kRequestSeconds));
}

}  // namespace overmind
