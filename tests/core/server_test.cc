// SPDX-License-Identifier: MIT
// The daemon against peers that do not keep to the rules, spoken to in raw frames.
#include "core/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <zmq.h>

#include <nlohmann/json.hpp>

#include "core/protocol.h"
#include "core/random.h"
#include "tests/core/daemon_fixture.h"

#ifdef __SANITIZE_THREAD__
// The distribution's libzmq is not instrumented: its own threads look unsynchronised.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:libzmq\ncalled_from_lib:libzmq\n";
}
#endif

namespace overmind {
namespace {

using namespace protocol;
using testing::wait_until;

class ServerTest : public testing::DaemonTest {
 protected:
  void SetUp() override {
    DaemonTest::SetUp();
    client_ = connected();
  }

  // A connection, before its hello.
  UniqueFd raw() {
    Result<UniqueFd> fd = connect_to(config_.socket_path(), deadline_in(5));
    EXPECT_TRUE(fd.ok()) << fd.status().to_string();
    return fd.ok() ? std::move(fd).value() : UniqueFd();
  }
  static void send(const UniqueFd& fd, const Request& request, int attached = -1) {
    Status sent = send_by(fd.get(), encode(request), attached, deadline_in(5));
    EXPECT_TRUE(sent.ok()) << sent.to_string();
  }
  // The reply, or nothing when the connection was closed instead.
  std::optional<Reply> receive(const UniqueFd& fd) {
    Result<Frame> frame = receive_by(fd.get(), *buffer_, deadline_in(10));
    EXPECT_NE(frame.status().code(), Code::kTimeout);
    if (!frame.ok()) return std::nullopt;
    Result<Reply> reply = decode_reply(frame.value().bytes);
    EXPECT_TRUE(reply.ok()) << reply.status().to_string();
    return reply.ok() ? std::optional(reply.value()) : std::nullopt;
  }
  std::optional<Reply> ask(const UniqueFd& fd, const Request& request, int attached = -1) {
    send(fd, request, attached);
    return receive(fd);
  }
  bool is_closed(const UniqueFd& fd) { return !receive(fd).has_value(); }

  UniqueFd greeted(std::uint64_t name, bool main = true) {
    UniqueFd fd = raw();
    std::optional<Reply> reply = ask(fd, Hello{static_cast<std::uint32_t>(kProtocolVersion), name, main, {}});
    EXPECT_TRUE(reply && std::holds_alternative<HelloReply>(*reply));
    return fd;
  }

  // A connection that has announced `plan` and a lease for it.
  struct Announced {
    UniqueFd main, connection, segment;
    SegmentPlan plan;
    EntryId id = 0;
  };
  Announced announce(std::uint8_t number, std::uint64_t size = 1000) {
    Announced it;
    std::uint64_t name = random_u64();
    it.main = greeted(name);
    std::optional<Reply> miss = ask(it.main, LookupRequest{key(number), true, 0});
    auto* lease = miss ? std::get_if<LeaseGranted>(&*miss) : nullptr;
    EXPECT_NE(lease, nullptr);
    Manifest draft;
    draft.key = key(number);
    draft.id = it.id = random_u64();
    it.plan = plan_segment(draft, {}, {}, {}, std::array<std::uint64_t, 1>{size}).value();
    it.segment = create_segment("test", it.plan.total_size).value();
    it.connection = greeted(name, false);
    Publish publish{lease == nullptr ? 0 : lease->token, it.id, it.plan.total_size, 1, "loader", "target"};
    std::optional<Reply> allowed = ask(it.connection, publish, it.segment.get());
    EXPECT_TRUE(allowed && std::holds_alternative<Ok>(*allowed));
    return it;
  }
  static void write(const Announced& it) {
    std::vector<char> bytes(it.plan.buffers[0].size, 'w');
    Source source{bytes.data(), bytes.size()};
    EXPECT_TRUE(write_segment(it.segment.get(), it.plan, {&source, 1}).ok());
  }
  bool lease_is_free(std::uint8_t number) {
    return wait_until([&] {
      Lookup lookup = look(*client_, key(number));
      if (lookup.kind != Lookup::Kind::kLease) return false;
      client_->abandon(lookup.lease);
      return true;
    });
  }
  bool still_serves() { return client_->stats().ok(); }

  std::unique_ptr<Client> client_;
  std::unique_ptr<FrameBuffer> buffer_ = std::make_unique<FrameBuffer>();
};

TEST_F(ServerTest, ARightCommitIsAccepted) {
  Announced it = announce(1);
  EXPECT_GE(client_->stats().value().reserved, it.plan.total_size);
  write(it);
  ASSERT_OK(seal_segment(it.segment.get()));
  std::optional<Reply> reply = ask(it.connection, Commit{});
  ASSERT_TRUE(reply && std::holds_alternative<Ok>(*reply));
  EXPECT_EQ(look(*client_, key(1)).kind, Lookup::Kind::kHit);
  EXPECT_EQ(client_->stats().value().reserved, 0u);
}

TEST_F(ServerTest, AnUnsealedSegmentIsRefused) {
  Announced it = announce(1);
  write(it);
  send(it.connection, Commit{});
  EXPECT_TRUE(is_closed(it.connection));
  EXPECT_TRUE(lease_is_free(1));
}

TEST_F(ServerTest, ASegmentOfAnotherSizeIsRefused) {
  Announced it = announce(1);
  write(it);
  ASSERT_EQ(::ftruncate(it.segment.get(), static_cast<off_t>(it.plan.total_size + 4096)), 0);
  ASSERT_OK(seal_segment(it.segment.get()));
  send(it.connection, Commit{});
  EXPECT_TRUE(is_closed(it.connection));
  EXPECT_TRUE(lease_is_free(1));
}

TEST_F(ServerTest, ABadManifestIsRefused) {
  Announced it = announce(1);
  write(it);
  ASSERT_EQ(::pwrite(it.segment.get(), "garbage", 7, 30), 7);
  ASSERT_OK(seal_segment(it.segment.get()));
  send(it.connection, Commit{});
  EXPECT_TRUE(is_closed(it.connection));
  EXPECT_TRUE(lease_is_free(1));
}

TEST_F(ServerTest, AnotherKeyThanTheLeasesIsRefused) {
  Announced it = announce(1);
  Manifest draft;
  draft.key = key(2);
  draft.id = it.id;
  it.plan = plan_segment(draft, {}, {}, {}, std::array<std::uint64_t, 1>{1000}).value();
  write(it);
  ASSERT_OK(seal_segment(it.segment.get()));
  send(it.connection, Commit{});
  EXPECT_TRUE(is_closed(it.connection));
  EXPECT_EQ(look(*client_, key(2), false).kind, Lookup::Kind::kAbsent);
}

TEST_F(ServerTest, APublicationThatEndsHalfWayFreesItsRoom) {
  Announced it = announce(1, 1 << 20);
  write(it);
  it.connection.reset();
  EXPECT_TRUE(lease_is_free(1));
  EXPECT_EQ(client_->stats().value().reserved, 0u);
  EXPECT_EQ(client_->stats().value().used, 0u);
}

TEST_F(ServerTest, ASnapshotOutlivesTheConnectionThatAsked) {
  Announced it = announce(1);
  it.main.reset();
  write(it);
  ASSERT_OK(seal_segment(it.segment.get()));
  std::optional<Reply> reply = ask(it.connection, Commit{});
  EXPECT_TRUE(reply && std::holds_alternative<Ok>(*reply));
}

TEST_F(ServerTest, PublishNeedsALeaseAndASegmentOfItsSize) {
  std::uint64_t name = random_u64();
  UniqueFd main = greeted(name);
  UniqueFd segment = create_segment("test", 4096).value();
  std::optional<Reply> reply = ask(greeted(name, false), Publish{1, 2, 4096, 0, "", ""}, segment.get());
  ASSERT_TRUE(reply && std::holds_alternative<Failure>(*reply));
  EXPECT_EQ(status_of(std::get<Failure>(*reply)).code(), Code::kNotFound);
  std::optional<Reply> miss = ask(main, LookupRequest{key(1), true, 0});
  ASSERT_TRUE(miss && std::holds_alternative<LeaseGranted>(*miss));
  Publish publish{std::get<LeaseGranted>(*miss).token, 2, 5000, 0, "", ""};
  reply = ask(greeted(name, false), publish, segment.get());
  ASSERT_TRUE(reply && std::holds_alternative<Failure>(*reply));
  EXPECT_EQ(status_of(std::get<Failure>(*reply)).code(), Code::kInvalid);
  EXPECT_TRUE(lease_is_free(1));
}

TEST_F(ServerTest, GarbageEndsOnlyItsOwnConnection) {
  std::vector<std::string> garbage = {"x", std::string(1000, '\0'), std::string(kMaxFrame, '\x81'),
                                      std::string(kMaxFrame + 1000, 'a'), "\xff\xff\xff"};
  for (const std::string& text : garbage) {
    UniqueFd fd = greeted(random_u64());
    ASSERT_OK(send_by(fd.get(), std::as_bytes(std::span(text)), -1, deadline_in(5)));
    EXPECT_TRUE(is_closed(fd));
  }
  EXPECT_TRUE(still_serves());
}

TEST_F(ServerTest, MessagesOutOfTurnEndTheConnection) {
  UniqueFd silent = raw();
  send(silent, StatsRequest{});  // before hello
  EXPECT_TRUE(is_closed(silent));
  UniqueFd twice = greeted(random_u64());
  send(twice, Hello{static_cast<std::uint32_t>(kProtocolVersion), 5, true, {}});
  EXPECT_TRUE(is_closed(twice));
  UniqueFd stranger = raw();
  send(stranger, Hello{static_cast<std::uint32_t>(kProtocolVersion), random_u64(), false, {}});  // joins nobody
  EXPECT_TRUE(is_closed(stranger));
  UniqueFd commit = greeted(random_u64());
  send(commit, Commit{});
  EXPECT_TRUE(is_closed(commit));
  EXPECT_TRUE(still_serves());
}

TEST_F(ServerTest, AnotherProtocolGetsItsReason) {
  UniqueFd fd = raw();
  std::optional<Reply> reply = ask(fd, Hello{99, 1, true, {}});
  ASSERT_TRUE(reply && std::holds_alternative<Failure>(*reply));
  EXPECT_EQ(std::get<Failure>(*reply).code, "version");
}

TEST_F(ServerTest, APeerThatNeverReadsIsClosedAndHoldsUpNobody) {
  for (std::uint8_t i = 0; i < 100; ++i) put(*client_, key(i));
  UniqueFd deaf = greeted(random_u64());
  Status sent;
  for (int i = 0; i < 20000 && sent.code() != Code::kUnavailable; ++i) {
    sent = send_frame(deaf.get(), encode(Request(ListRequest{0})));
    if (i % 500 == 0) {
      EXPECT_TRUE(still_serves());
    }
  }
  EXPECT_EQ(sent.code(), Code::kUnavailable);
  EXPECT_TRUE(still_serves());
}

TEST_F(ServerTest, MoreConnectionsThanThereIsRoomForWait) {
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 1100; ++i) {
    Result<UniqueFd> fd = connect_to(config_.socket_path(), deadline_in(0.2));
    if (!fd.ok()) break;
    crowd.push_back(std::move(fd).value());
  }
  EXPECT_TRUE(still_serves());
  crowd.clear();
  Client later(config_);
  EXPECT_TRUE(wait_until([&] { return later.connect(false).ok(); }));
}

TEST_F(ServerTest, DescriptorsThatNobodyAskedForAreClosed) {
  auto daemon_descriptors = [&] {
    std::string path = "/proc/" + std::to_string(server_pid(*client_)) + "/fd";
    return std::distance(std::filesystem::directory_iterator(path), {});
  };
  UniqueFd fd = greeted(random_u64());
  auto before = daemon_descriptors();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(ask(fd, StatsRequest{}, fd.get()).has_value());
  EXPECT_EQ(daemon_descriptors(), before);
}

TEST_F(ServerTest, EventsTellTheStory) {
  void* context = ::zmq_ctx_new();
  void* socket = ::zmq_socket(context, ZMQ_SUB);
  int timeout = 200;
  ::zmq_setsockopt(socket, ZMQ_RCVTIMEO, &timeout, sizeof(timeout));
  ::zmq_setsockopt(socket, ZMQ_SUBSCRIBE, "", 0);
  ASSERT_EQ(::zmq_connect(socket, ("ipc://" + config_.events_path()).c_str()), 0);
  std::vector<nlohmann::json> events;
  auto read_one = [&] {
    char topic[64], text[4096];
    int topic_size = ::zmq_recv(socket, topic, sizeof(topic), 0);
    if (topic_size < 0) return false;
    int size = ::zmq_recv(socket, text, sizeof(text), 0);
    events.push_back(nlohmann::json::parse(std::string_view(text, static_cast<std::size_t>(size))));
    EXPECT_EQ(events.back()["event"], std::string(topic, static_cast<std::size_t>(topic_size)));
    return true;
  };
  // A subscription takes its time to arrive: leases of other keys, until one is heard.
  std::uint8_t probe = 100;
  ASSERT_TRUE(wait_until([&] { return look(*client_, key(probe++)).kind == Lookup::Kind::kLease && read_one(); }));
  while (read_one()) continue;
  events.clear();
  EntryId id = put(*client_, key(1));
  look(*client_, key(1));
  client_->used(id);
  ASSERT_OK(client_->drop(id));
  ASSERT_TRUE(wait_until([&] { return read_one() && events.size() == 5; }));
  std::vector<std::string> names;
  for (const auto& event : events) names.push_back(event["event"]);
  EXPECT_EQ(names, (std::vector<std::string>{"lease", "publish", "committed", "hit", "dropped"}));
  EXPECT_EQ(events[2]["id"], entry_id_to_string(id));
  EXPECT_EQ(events[2]["target"], "/models/one");
  EXPECT_GT(events[2]["nbytes"], 100);
  ::zmq_close(socket);
  ::zmq_ctx_term(context);
}

}  // namespace
}  // namespace overmind
