// SPDX-License-Identifier: MIT
#include "core/keeper.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "core/log.h"

namespace overmind {
namespace {

using Op = KeeperMessage::Op;

constexpr double kStopSeconds = 5;  // for a server to end after SIGTERM

KeeperMessage message_for(Op op, EntryId id, const Entry* entry) {
  KeeperMessage message{};
  message.op = op;
  message.id = id;
  if (entry != nullptr) {
    message.pinned = entry->pinned;
    message.hits = entry->hits;
    message.last_used = entry->last_used;
  }
  return message;
}

class Keeper {
 public:
  Keeper(StartedServer server, const StartServer& serve) : server_(std::move(server)), serve_(serve) {
    sigset_t signals;
    ::sigemptyset(&signals);
    ::sigaddset(&signals, SIGTERM);
    signals_.reset(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  }

  KeeperEnd run() {
    while (watch()) {
      log_line(LogLevel::kError,
               "the server died; starting it again with " + std::to_string(kept_.size()) + " entries");
      if (!restart()) return KeeperEnd::kGaveUp;
    }
    return KeeperEnd::kStopped;
  }

 private:
  bool restart() {
    server_.socket.reset();
    if (!guard_.allow(std::chrono::steady_clock::now())) {
      log_line(LogLevel::kError, "the server died too often within ten seconds; giving up");
      return false;
    }
    StartServer serve_kept = [this](UniqueFd socket, const KeptEntries&) {
      signals_.reset();
      return serve_(std::move(socket), std::move(kept_));
    };
    std::optional<StartedServer> started = start_server(serve_kept, {});
    if (started) server_ = std::move(*started);
    return started.has_value();
  }

  // True: the server died. False: it ended on purpose, or was told to.
  bool watch() {
    std::optional<Deadline> kill_at;
    for (;;) {
      pollfd fds[] = {{server_.socket.get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}};
      int ready = ::poll(fds, 2, kill_at ? 100 : -1);
      if (ready < 0 && errno != EINTR) return false;
      if (kill_at && std::chrono::steady_clock::now() > *kill_at && server_.pid > 0) {
        ::kill(server_.pid, SIGKILL);
        return false;
      }
      if (fds[1].revents != 0 && !kill_at) {
        if (server_.pid > 0) ::kill(server_.pid, SIGTERM);
        kill_at = deadline_in(kStopSeconds);
      }
      if (fds[0].revents == 0) continue;
      bool gone = drain();
      if (bye_) return false;
      if (gone) return !kill_at;
    }
  }

  // Takes all that was sent, also by a server that is dead by now. True when it is.
  bool drain() {
    for (;;) {
      Result<Frame> frame = receive_frame(server_.socket.get(), buffer_);
      if (!frame.ok()) return frame.status().code() != Code::kTimeout;
      if (frame.value().bytes.empty()) return true;
      KeeperMessage message;
      if (frame.value().bytes.size() != sizeof(message)) continue;
      std::memcpy(&message, frame.value().bytes.data(), sizeof(message));
      apply(message, std::move(frame.value().fd));
    }
  }

  void apply(const KeeperMessage& message, UniqueFd fd) {
    switch (message.op) {
      case Op::kKeep:
        kept_[message.id].fd = std::move(fd);
        [[fallthrough]];
      case Op::kMark:
        if (auto kept = kept_.find(message.id); kept != kept_.end()) {
          kept->second.pinned = message.pinned != 0;
          kept->second.hits = message.hits;
          kept->second.last_used = message.last_used;
        }
        break;
      case Op::kForget:
        kept_.erase(message.id);
        break;
      case Op::kBye:
        bye_ = true;
        break;
    }
  }

  StartedServer server_;
  UniqueFd signals_;
  const StartServer& serve_;
  KeptEntries kept_;
  RestartGuard guard_;
  bool bye_ = false;
  FrameBuffer buffer_;
};

}  // namespace

void KeeperLink::attach(UniqueFd socket, const Catalog& catalog) {
  socket_ = std::move(socket);
  queue_.clear();
  for (const auto& [id, entry] : catalog.entries()) queue_.push_back({Op::kKeep, id});
  flush(catalog);
}

void KeeperLink::detach() {
  socket_.reset();
  queue_.clear();
}

// A use that is not told costs nothing but the order of eviction after a crash.
void KeeperLink::mark(const Entry& entry, const Catalog& catalog) { push(Op::kMark, entry.id, catalog); }

void KeeperLink::push(Op op, EntryId id, const Catalog& catalog) {
  if (!socket_.valid()) return;
  if (op == Op::kMark && !queue_.empty() && queue_.size() > catalog.entries().size()) return;
  queue_.push_back({op, id});
  flush(catalog);
}

void KeeperLink::flush(const Catalog& catalog) {
  while (socket_.valid() && !queue_.empty()) {
    Item item = queue_.front();
    const Entry* entry = catalog.find(item.id);
    if (item.op != Op::kForget && entry == nullptr) {  // gone since; its own kForget follows
      queue_.pop_front();
      continue;
    }
    KeeperMessage message = message_for(item.op, item.id, entry);
    Status sent =
        send_frame(socket_.get(), std::as_bytes(std::span(&message, 1)), item.op == Op::kKeep ? entry->fd.get() : -1);
    if (!sent.ok()) {
      if (sent.code() != Code::kTimeout) log_line(LogLevel::kWarning, "keeper: " + sent.to_string());
      return;
    }
    queue_.pop_front();
  }
}

void KeeperLink::bye() {
  if (!socket_.valid()) return;
  KeeperMessage message = message_for(Op::kBye, 0, nullptr);
  Status sent = send_by(socket_.get(), std::as_bytes(std::span(&message, 1)), -1, deadline_in(1));
  if (!sent.ok()) log_line(LogLevel::kWarning, "keeper: " + sent.to_string());
}

bool RestartGuard::allow(Deadline now) {
  while (!starts_.empty() && now - starts_.front() > std::chrono::seconds(10)) starts_.pop_front();
  if (starts_.size() >= 5) return false;
  starts_.push_back(now);
  return true;
}

std::optional<StartedServer> start_server(const StartServer& serve, KeptEntries kept) {
  int pair[2];
  int pid = -1;
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0) {
    StartedServer started{UniqueFd(pair[0]), 0};
    UniqueFd theirs(pair[1]);
    pid = started.pid = ::fork();
    if (pid > 0) return started;
    if (pid == 0) {
      started.socket.reset();
      std::exit(serve(std::move(theirs), std::move(kept)));
    }
  }
  log_line(LogLevel::kError, "no server: " + errno_status("socketpair or fork").to_string());
  return std::nullopt;
}

KeeperEnd keep(StartedServer server, const StartServer& serve) { return Keeper(std::move(server), serve).run(); }

}  // namespace overmind
