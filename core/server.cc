// SPDX-License-Identifier: MIT
#include "core/server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <unordered_map>
#include <utility>

#include "core/log.h"
#include "core/store.h"

namespace overmind {
namespace {

constexpr std::size_t kMaxQueued = 64;  // frames that one client has not read yet
constexpr int kBatch = 32;              // frames taken from one client before the others have their turn
constexpr std::uint64_t kMinFree = 256 << 20;

// What epoll reports: the kind in the upper bits, the connection below. Connection ids are never used
// twice, so an event that comes after its connection was closed finds nothing.
enum class Source : std::uint64_t { kListener, kSignals, kKeeper, kPressure, kFolder, kClient, kProcess };
constexpr int kSourceShift = 56;

struct Outgoing {
  std::vector<std::byte> bytes;
  UniqueFd fd;
};

struct Client {
  ConnectionId id = 0;
  UniqueFd fd;
  UniqueFd process;  // pidfd: a forked child may hold our socket after its parent died
  pid_t pid = 0;
  ConnectionId owner = 0;  // main connection of its process; 0 before hello
  std::uint64_t name = 0;  // Hello::client of a main connection
  std::deque<Outgoing> queue;
  const char* doomed = nullptr;  // why it gets closed, once the current event is done
};

class Server : public StoreListener {
 public:
  explicit Server(ServerSetup setup);
  Status run();

  void answer(ConnectionId to, const Answer& answer) override;
  void event(const Event& event) override;
  void added(const Entry& entry) override { keeper_.keep(entry, store_.catalog()); }
  void changed(const Entry& entry) override { keeper_.mark(entry, store_.catalog()); }
  void removed(EntryId id) override { keeper_.forget(id, store_.catalog()); }

 private:
  Status open_sources();
  void open_pressure();
  void watch_folder();
  void adopt_kept();
  bool watch(int fd, std::uint32_t events, Source source, ConnectionId id = 0, bool change = false);
  int wait_ms() const;
  void dispatch(const epoll_event& event);

  void accept_clients();
  void stop_listening(const std::string& why);
  void listen_again();
  void admit(UniqueFd fd);
  void client_ready(Client& client, std::uint32_t events);
  bool read_one(Client& client);
  void flush(Client& client);
  void close_doomed();
  void doom(Client& client, const char* why);

  std::optional<Answer> handle(Client& client, const protocol::Hello& hello, UniqueFd);
  std::optional<Answer> handle(Client& client, const protocol::LookupRequest& request, UniqueFd);
  std::optional<Answer> handle(Client&, const protocol::Abandon& request, UniqueFd);
  std::optional<Answer> handle(Client& client, const protocol::Publish& request, UniqueFd segment);
  std::optional<Answer> handle(Client& client, const protocol::Commit&, UniqueFd);
  std::optional<Answer> handle(Client& client, const protocol::Used& request, UniqueFd);
  std::optional<Answer> handle(Client& client, const protocol::Unmapped& request, UniqueFd);
  std::optional<Answer> handle(Client&, const protocol::ListRequest& request, UniqueFd);
  std::optional<Answer> handle(Client&, const protocol::StatsRequest&, UniqueFd);
  std::optional<Answer> handle(Client& client, const protocol::OpenRequest& request, UniqueFd);
  std::optional<Answer> handle(Client&, const protocol::Drop& request, UniqueFd);
  std::optional<Answer> handle(Client&, const protocol::DropAll&, UniqueFd);
  std::optional<Answer> handle(Client&, const protocol::Pin& request, UniqueFd);
  std::optional<Answer> handle(Client&, const protocol::Stop&, UniqueFd);

  LogLevel level_of(const Event& event);
  void keeper_ready(std::uint32_t events);
  void watch_keeper();
  void folder_changed();
  void relieve_pressure();
  bool is_idle_too_long(Deadline now) const;

  ServerSetup setup_;
  KeeperLink keeper_;
  RestartGuard keeper_guard_;
  std::unique_ptr<EventBus> bus_;
  std::size_t max_clients_;
  std::uint64_t min_free_;
  Store store_;
  UniqueFd epoll_, signals_, pressure_, folder_;
  std::unordered_map<ConnectionId, std::unique_ptr<Client>> clients_;
  std::unordered_map<std::uint64_t, ConnectionId> by_name_;
  std::vector<ConnectionId> doomed_;
  std::unique_ptr<FrameBuffer> buffer_ = std::make_unique<FrameBuffer>();
  ConnectionId last_id_ = 0;
  Deadline now_, started_, last_client_, listen_again_;
  bool stopping_ = false;
  bool listening_ = false;
  bool told_of_files_ = false;
};

std::size_t open_files() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<std::size_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 20));
}

// One descriptor each. Half of what the server does not need itself: a client takes up to three (socket, process,
// segment).
Limits limits_of(std::uint64_t budget) {
  constexpr std::size_t kOwn = 24;
  std::size_t files = open_files();
  return {.budget = budget, .entries = files > kOwn + 2 ? (files - kOwn) / 2 : 1, .files = files};
}

Server::Server(ServerSetup setup)
    : setup_(std::move(setup)),
      keeper_(std::move(setup_.keeper)),
      max_clients_(std::clamp<std::size_t>(open_files() / 8, 8, 1024)),
      min_free_(std::max(kMinFree, available_memory() / 16)),
      store_(limits_of(setup_.budget), *this) {}

Status Server::open_sources() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  signals_.reset(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!epoll_.valid() || !signals_.valid()) return errno_status("epoll or signalfd");
  if (!watch(signals_.get(), EPOLLIN, Source::kSignals)) return errno_status("epoll_ctl");
  Result<std::unique_ptr<EventBus>> bus = EventBus::bind(setup_.config.events_path());
  if (bus.ok()) {
    bus_ = std::move(bus).value();
  } else {
    log_line(LogLevel::kWarning, bus.status().to_string() + "; nobody can watch events");
  }
  open_pressure();
  watch_folder();
  return {};
}

// Some task stalled for 150 ms of 2 s because memory was short. Kernels without PSI go without.
void Server::open_pressure() {
  constexpr char kTrigger[] = "some 150000 2000000";
  pressure_.reset(::open("/proc/pressure/memory", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!pressure_.valid()) return;
  if (::write(pressure_.get(), kTrigger, sizeof(kTrigger)) < 0 ||
      !watch(pressure_.get(), EPOLLPRI, Source::kPressure)) {
    pressure_.reset();
  }
}

// Whoever deletes the runtime folder leaves a daemon that nobody can reach, with all its memory.
void Server::watch_folder() {
  folder_.reset(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!folder_.valid()) return;
  if (::inotify_add_watch(folder_.get(), setup_.config.instance_dir().c_str(), IN_DELETE | IN_MOVED_FROM) < 0 ||
      !watch(folder_.get(), EPOLLIN, Source::kFolder)) {
    folder_.reset();
  }
}

void Server::adopt_kept() {
  for (auto& [id, kept] : setup_.kept) {
    Result<Entry> read = read_entry(std::move(kept.fd));
    if (!read.ok() || store_.catalog().find(read.value().key) != nullptr) {
      log_line(LogLevel::kError, "entry " + entry_id_to_string(id) + " is lost: " + read.status().to_string());
      continue;
    }
    Entry entry = std::move(read).value();
    entry.pinned = kept.pinned;
    entry.hits = kept.hits;
    entry.last_used = kept.last_used;
    store_.adopt(std::move(entry));
  }
  setup_.kept.clear();
}

Status Server::run() {
  now_ = started_ = last_client_ = std::chrono::steady_clock::now();
  if (Status opened = open_sources(); !opened.ok()) return opened;
  adopt_kept();
  watch_keeper();
  listening_ = watch(setup_.listener, EPOLLIN, Source::kListener);
  if (!listening_) return errno_status("epoll_ctl");
  setup_.ready({});
  log_line(LogLevel::kInfo, "serving at " + setup_.config.socket_path() + ", budget " + human_bytes(setup_.budget));
  while (!stopping_) {
    epoll_event events[64];
    int count = ::epoll_wait(epoll_.get(), events, 64, wait_ms());
    if (count < 0 && errno != EINTR) return errno_status("epoll_wait");
    now_ = std::chrono::steady_clock::now();
    for (int i = 0; i < count && !stopping_; ++i) dispatch(events[i]);
    store_.tick(now_);
    close_doomed();
    listen_again();
    if (is_idle_too_long(now_)) stopping_ = true;
  }
  log_line(LogLevel::kInfo, "stopping");
  ::unlink(setup_.config.socket_path().c_str());
  bus_.reset();
  ::unlink(setup_.config.events_path().c_str());
  keeper_.bye();
  return {};
}

bool Server::watch(int fd, std::uint32_t events, Source source, ConnectionId id, bool change) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<std::uint64_t>(source) << kSourceShift | id;
  return ::epoll_ctl(epoll_.get(), change ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) == 0;
}

int Server::wait_ms() const {
  std::optional<Deadline> next = store_.next_tick();
  if (setup_.config.idle_exit_seconds > 0 && clients_.empty()) {
    Deadline idle = last_client_ + std::chrono::duration_cast<Deadline::duration>(
                                       std::chrono::duration<double>(setup_.config.idle_exit_seconds));
    next = next ? std::min(*next, idle) : idle;
  }
  if (!listening_ && clients_.size() < max_clients_) next = next ? std::min(*next, listen_again_) : listen_again_;
  if (!next) return -1;
  auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30));
}

bool Server::is_idle_too_long(Deadline now) const {
  double limit = setup_.config.idle_exit_seconds;
  return limit > 0 && clients_.empty() && std::chrono::duration<double>(now - last_client_).count() >= limit;
}

void Server::dispatch(const epoll_event& event) {
  ConnectionId id = event.data.u64 & ((std::uint64_t{1} << kSourceShift) - 1);
  auto client = clients_.find(id);
  switch (static_cast<Source>(event.data.u64 >> kSourceShift)) {
    case Source::kListener:
      accept_clients();
      break;
    case Source::kSignals:
      stopping_ = true;
      break;
    case Source::kKeeper:
      keeper_ready(event.events);
      break;
    case Source::kPressure:
      relieve_pressure();
      break;
    case Source::kFolder:
      folder_changed();
      break;
    case Source::kClient:
      if (client != clients_.end()) client_ready(*client->second, event.events);
      break;
    case Source::kProcess:
      if (client != clients_.end()) doom(*client->second, "its process ended");
      break;
  }
  close_doomed();
}

// ---- connections

void Server::accept_clients() {
  for (int i = 0; i < kBatch && clients_.size() < max_clients_; ++i) {
    Result<std::optional<UniqueFd>> accepted = accept_from(setup_.listener);
    if (accepted.ok() && !accepted.value()) return;
    if (!accepted.ok()) return stop_listening(accepted.status().to_string());
    admit(*std::move(accepted).value());
  }
  if (clients_.size() >= max_clients_) stop_listening(std::to_string(clients_.size()) + " connections are open");
}

// New ones wait in the backlog, where their own deadlines tell them, until somebody leaves. A listener
// that can't accept would keep the loop spinning.
void Server::stop_listening(const std::string& why) {
  log_line(LogLevel::kWarning, "no more connections for now: " + why);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, setup_.listener, nullptr);
  listening_ = false;
  listen_again_ = now_ + std::chrono::milliseconds(100);
}

void Server::listen_again() {
  if (listening_ || clients_.size() >= max_clients_ || now_ < listen_again_) return;
  listening_ = watch(setup_.listener, EPOLLIN, Source::kListener);
}

void Server::admit(UniqueFd fd) {
  Result<Peer> peer = peer_of(fd.get());
  if (!peer.ok() || peer.value().uid != ::geteuid()) {
    log_line(LogLevel::kWarning, "connection of another user refused");
    return;
  }
  auto client = std::make_unique<Client>();
  client->id = ++last_id_;
  client->fd = std::move(fd);
  client->pid = peer.value().pid;
  if (!watch(client->fd.get(), EPOLLIN, Source::kClient, client->id)) return;
  last_client_ = now_;
  clients_.emplace(client->id, std::move(client));
}

void Server::client_ready(Client& client, std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) flush(client);
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  for (int i = 0; i < kBatch && client.doomed == nullptr && !stopping_; ++i) {
    if (!read_one(client)) return;
  }
}

// False when there is nothing more to read for now.
bool Server::read_one(Client& client) {
  Result<Frame> frame = receive_frame(client.fd.get(), *buffer_);
  if (!frame.ok() && frame.status().code() == Code::kTimeout) return false;
  if (!frame.ok()) {
    doom(client, frame.status().code() == Code::kInvalid ? "message too long" : "connection failed");
    return false;
  }
  if (frame.value().bytes.empty()) {
    doom(client, "closed");
    return false;
  }
  Result<protocol::Request> request = protocol::decode_request(frame.value().bytes);
  if (!request.ok()) {
    log_line(LogLevel::kWarning, "process " + std::to_string(client.pid) + ": " + request.status().to_string());
    doom(client, "malformed message");
    return false;
  }
  bool is_hello = std::holds_alternative<protocol::Hello>(request.value());
  if (is_hello == (client.owner != 0) || store_.is_waiting(client.id)) {
    doom(client, "message out of turn");
    return false;
  }
  std::optional<Answer> reply = std::visit(
      [&](const auto& message) { return handle(client, message, std::move(frame.value().fd)); }, request.value());
  if (reply && client.doomed == nullptr) answer(client.id, *reply);
  return true;
}

void Server::answer(ConnectionId to, const Answer& answer) {
  auto found = clients_.find(to);
  if (found == clients_.end() || found->second->doomed != nullptr) return;
  Client& client = *found->second;
  Outgoing out{protocol::encode(answer.reply), UniqueFd()};
  if (client.queue.empty()) {
    Status sent = send_frame(client.fd.get(), out.bytes, answer.fd);
    if (sent.ok()) return;
    if (sent.code() != Code::kTimeout) return doom(client, "send failed");
  }
  if (client.queue.size() >= kMaxQueued) return doom(client, "does not read its replies");
  // The entry may be gone before the client reads: the message keeps a descriptor of its own.
  if (answer.fd >= 0) out.fd.reset(::fcntl(answer.fd, F_DUPFD_CLOEXEC, 0));
  if (answer.fd >= 0 && !out.fd.valid()) return doom(client, "no descriptor left");
  client.queue.push_back(std::move(out));
  watch(client.fd.get(), EPOLLIN | EPOLLOUT, Source::kClient, client.id, /*change=*/true);
}

void Server::flush(Client& client) {
  while (!client.queue.empty() && client.doomed == nullptr) {
    const Outgoing& out = client.queue.front();
    Status sent = send_frame(client.fd.get(), out.bytes, out.fd.get());
    if (sent.code() == Code::kTimeout) return;
    if (!sent.ok()) return doom(client, "send failed");
    client.queue.pop_front();
  }
  watch(client.fd.get(), EPOLLIN, Source::kClient, client.id, /*change=*/true);
}

// Closing waits until nobody works with the connection any more.
void Server::doom(Client& client, const char* why) {
  if (client.doomed != nullptr) return;
  client.doomed = why;
  doomed_.push_back(client.id);
}

void Server::close_doomed() {
  while (!doomed_.empty()) {
    auto found = clients_.find(doomed_.back());
    doomed_.pop_back();
    std::unique_ptr<Client> client = std::move(found->second);
    clients_.erase(found);
    log_line(LogLevel::kDebug, "process " + std::to_string(client->pid) + ": " + client->doomed);
    last_client_ = now_;
    if (client->name != 0) {
      by_name_.erase(client->name);
      for (auto& [id, other] : clients_) {
        if (other->owner == client->id) doom(*other, "its main connection closed");
      }
    }
    store_.disconnected(client->id, client->doomed, now_);
  }
}

// ---- requests

std::optional<Answer> Server::handle(Client& client, const protocol::Hello& hello, UniqueFd) {
  if (hello.version != static_cast<std::uint32_t>(kProtocolVersion)) {
    return Answer{
        protocol::failure_of({Code::kVersion, "the daemon speaks protocol " + std::to_string(kProtocolVersion) +
                                                  ", not " + std::to_string(hello.version)})};
  }
  auto known = by_name_.find(hello.client);
  if (hello.client == 0 || hello.main == (known != by_name_.end())) {
    doom(client, "hello of an unknown process, or twice");
    return std::nullopt;
  }
  client.owner = hello.main ? client.id : known->second;
  if (hello.main) {
    client.name = hello.client;
    by_name_[hello.client] = client.id;
    client.process.reset(static_cast<int>(::syscall(SYS_pidfd_open, client.pid, 0)));
    if (client.process.valid()) watch(client.process.get(), EPOLLIN, Source::kProcess, client.id);
    store_.mapped(client.id, hello.mapped);
  } else if (clients_.at(known->second)->pid != client.pid) {
    doom(client, "joins another process");
    return std::nullopt;
  }
  return Answer{protocol::HelloReply{static_cast<std::uint32_t>(kProtocolVersion), OVERMIND_VERSION}};
}

std::optional<Answer> Server::handle(Client& client, const protocol::LookupRequest& request, UniqueFd) {
  return store_.lookup(client.id, client.owner, request, now_);
}

std::optional<Answer> Server::handle(Client&, const protocol::Abandon& request, UniqueFd) {
  store_.abandon(request.token, now_);
  return std::nullopt;
}

// From here on the connection is the snapshot's: it outlives the process that asked.
std::optional<Answer> Server::handle(Client& client, const protocol::Publish& request, UniqueFd segment) {
  if (client.owner == client.id) {
    doom(client, "publish on a main connection");
    return std::nullopt;
  }
  client.owner = client.id;
  return store_.publish(client.id, request, std::move(segment), available_memory(), now_);
}

std::optional<Answer> Server::handle(Client& client, const protocol::Commit&, UniqueFd) {
  Status committed = store_.commit(client.id);
  if (committed.ok()) return Answer{protocol::Ok{}};
  log_line(LogLevel::kWarning, "snapshot refused: " + committed.to_string());
  doom(client, "snapshot refused");
  return std::nullopt;
}

std::optional<Answer> Server::handle(Client&, const protocol::Used& request, UniqueFd) {
  store_.used(request.id);
  return std::nullopt;
}

std::optional<Answer> Server::handle(Client& client, const protocol::Unmapped& request, UniqueFd) {
  store_.unmapped(client.owner, request.ids);
  return std::nullopt;
}

std::optional<Answer> Server::handle(Client&, const protocol::ListRequest& request, UniqueFd) {
  return Answer{store_.list(request.after)};
}

// Anonymous and file pages of this process; what is shared memory is segments.
std::uint64_t own_rss() {
  std::ifstream status("/proc/self/status");
  std::uint64_t sum = 0, kib = 0;
  for (std::string word; status >> word;) {
    if ((word == "RssAnon:" || word == "RssFile:") && status >> kib) sum += kib * 1024;
  }
  return sum;
}

std::optional<Answer> Server::handle(Client&, const protocol::StatsRequest&, UniqueFd) {
  StoreStats stats = store_.stats();
  stats.uptime_seconds = std::chrono::duration<double>(now_ - started_).count();
  stats.daemon_pid = static_cast<std::uint64_t>(::getpid());
  stats.daemon_rss = own_rss();
  stats.version = OVERMIND_VERSION;
  return Answer{stats};
}

std::optional<Answer> Server::handle(Client& client, const protocol::OpenRequest& request, UniqueFd) {
  return store_.open(client.owner, request.id);
}

Answer answer_of(const Status& status) {
  if (status.ok()) return {protocol::Ok{}};
  return {protocol::failure_of(status)};
}

std::optional<Answer> Server::handle(Client&, const protocol::Drop& request, UniqueFd) {
  return answer_of(store_.drop(request.id));
}

std::optional<Answer> Server::handle(Client&, const protocol::DropAll&, UniqueFd) {
  return Answer{protocol::Dropped{store_.drop_all()}};
}

std::optional<Answer> Server::handle(Client&, const protocol::Pin& request, UniqueFd) {
  return answer_of(store_.pin(request.id, request.on));
}

std::optional<Answer> Server::handle(Client&, const protocol::Stop&, UniqueFd) {
  stopping_ = true;
  return Answer{protocol::Ok{}};
}

// ---- keeper, events, memory

void Server::watch_keeper() {
  if (keeper_.fd() >= 0) watch(keeper_.fd(), EPOLLIN | EPOLLOUT | EPOLLET, Source::kKeeper);
}

// The keeper never writes: something to read is its end.
void Server::keeper_ready(std::uint32_t events) {
  if ((events & (EPOLLHUP | EPOLLERR | EPOLLIN)) == 0) return keeper_.flush(store_.catalog());
  keeper_.detach();
  if (!keeper_guard_.allow(now_)) {
    log_line(LogLevel::kError, "the keeper died five times in ten seconds; going on without");
    return;
  }
  log_line(LogLevel::kError, "the keeper died; starting a new one");
  keeper_.attach(setup_.start_keeper(), store_.catalog());
  watch_keeper();
}

LogLevel Server::level_of(const Event& event) {
  if (event.name == "failed") return LogLevel::kWarning;
  if (event.name == "progress") return LogLevel::kDebug;
  // Once: from then on each new entry costs an old one.
  bool files = event.name == "evicted" && event.reason == files_reason(store_.limits());
  return files && !std::exchange(told_of_files_, true) ? LogLevel::kWarning : LogLevel::kInfo;
}

void Server::event(const Event& event) {
  log_line(level_of(event), std::string(event.name) + " " + entry_id_to_string(event.id) + " " + event.loader + " " +
                                event.target + (event.reason.empty() ? "" : ": " + event.reason));
  if (bus_) bus_->send(event);
}

void Server::folder_changed() {
  alignas(inotify_event) char events[4096];
  while (::read(folder_.get(), events, sizeof(events)) > 0) continue;  // what it was is asked of the file system
  if (::access(setup_.config.socket_path().c_str(), F_OK) == 0 || errno != ENOENT) return;
  log_line(LogLevel::kError, setup_.config.socket_path() + " was deleted, nobody can reach this daemon any more");
  stopping_ = true;
}

void Server::relieve_pressure() {
  std::uint64_t available = available_memory();
  if (available >= min_free_) return;
  std::size_t count = store_.relieve_memory(min_free_ - available);
  if (count > 0) log_line(LogLevel::kWarning, "memory is short: evicted " + std::to_string(count) + " entries");
}

}  // namespace

Status serve(ServerSetup setup) { return Server(std::move(setup)).run(); }

}  // namespace overmind
