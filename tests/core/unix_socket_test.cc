// SPDX-License-Identifier: MIT
#include "core/unix_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstring>
#include <memory>

#include "tests/core/testing.h"

namespace overmind {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }
std::string text_of(const Frame& frame) {
  return {reinterpret_cast<const char*>(frame.bytes.data()), frame.bytes.size()};
}

class UnixSocketTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<UniqueFd> listener = listen_at(path_);
    ASSERT_OK(listener);
    listener_ = std::move(listener).value();
    Result<UniqueFd> client = connect_to(path_, deadline_in(5));
    ASSERT_OK(client);
    client_ = std::move(client).value();
    Result<std::optional<UniqueFd>> server = accept_from(listener_.get());
    ASSERT_OK(server);
    ASSERT_TRUE(server.value().has_value());
    server_ = *std::move(server).value();
  }

  testing::TempDir folder_;
  std::string path_ = folder_ / "socket";
  UniqueFd listener_, client_, server_;
  std::unique_ptr<FrameBuffer> buffer_ = std::make_unique<FrameBuffer>();
};

TEST_F(UnixSocketTest, FramesKeepTheirBoundaries) {
  ASSERT_OK(send_frame(client_.get(), bytes_of("one")));
  ASSERT_OK(send_frame(client_.get(), bytes_of("two")));
  EXPECT_EQ(text_of(receive_frame(server_.get(), *buffer_).value()), "one");
  EXPECT_EQ(text_of(receive_frame(server_.get(), *buffer_).value()), "two");
  EXPECT_EQ(receive_frame(server_.get(), *buffer_).status().code(), Code::kTimeout);
}

TEST_F(UnixSocketTest, AFullFrameArrivesAndALongerOneIsInvalid) {
  std::string text(kMaxFrame, 'f');
  ASSERT_OK(send_frame(client_.get(), bytes_of(text)));
  EXPECT_EQ(text_of(receive_frame(server_.get(), *buffer_).value()), text);
  ASSERT_OK(send_frame(client_.get(), bytes_of(text + "f")));
  EXPECT_EQ(receive_frame(server_.get(), *buffer_).status().code(), Code::kInvalid);
}

TEST_F(UnixSocketTest, ADescriptorTravelsCloseOnExec) {
  UniqueFd file(::open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY));
  ASSERT_OK(send_frame(client_.get(), bytes_of("folder"), file.get()));
  Result<Frame> frame = receive_frame(server_.get(), *buffer_);
  ASSERT_OK(frame);
  ASSERT_TRUE(frame.value().fd.valid());
  EXPECT_NE(::fcntl(frame.value().fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  struct stat here {
  }, there{};
  ::fstat(file.get(), &here);
  ::fstat(frame.value().fd.get(), &there);
  EXPECT_EQ(here.st_ino, there.st_ino);
}

// A hostile peer sends many at once: none may stay open.
TEST_F(UnixSocketTest, FurtherDescriptorsAreClosed) {
  constexpr int kMany = 50;
  std::vector<int> sent(kMany, client_.get());
  char byte = 'x';
  iovec part{&byte, 1};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * kMany));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * kMany);
  std::memcpy(CMSG_DATA(header), sent.data(), sizeof(int) * kMany);
  std::size_t before = testing::open_descriptors();
  ASSERT_EQ(::sendmsg(client_.get(), &message, 0), 1);
  {
    Result<Frame> frame = receive_frame(server_.get(), *buffer_);
    ASSERT_OK(frame);
    EXPECT_TRUE(frame.value().fd.valid());
    EXPECT_EQ(testing::open_descriptors(), before + 1);
  }
  EXPECT_EQ(testing::open_descriptors(), before);
}

TEST_F(UnixSocketTest, TheEndIsAnEmptyFrameOrUnavailable) {
  client_.reset();
  Result<Frame> frame = receive_frame(server_.get(), *buffer_);
  ASSERT_OK(frame);
  EXPECT_TRUE(frame.value().bytes.empty());
  EXPECT_EQ(send_frame(server_.get(), bytes_of("late")).code(), Code::kUnavailable);
  EXPECT_EQ(receive_by(server_.get(), *buffer_, deadline_in(5)).status().code(), Code::kUnavailable);
}

TEST_F(UnixSocketTest, APeerThatDoesNotReadBlocksNobody) {
  std::string text(60000, 's');
  Status sent;
  for (int i = 0; i < 1000 && sent.ok(); ++i) sent = send_frame(client_.get(), bytes_of(text));
  EXPECT_EQ(sent.code(), Code::kTimeout);
  EXPECT_EQ(send_by(client_.get(), bytes_of(text), -1, deadline_in(0.02)).code(), Code::kTimeout);
}

TEST_F(UnixSocketTest, ASilentPeerEndsInATimeout) {
  EXPECT_EQ(receive_by(client_.get(), *buffer_, deadline_in(0.02)).status().code(), Code::kTimeout);
}

TEST_F(UnixSocketTest, PeersAreKnown) {
  for (int fd : {client_.get(), server_.get()}) {
    Result<Peer> peer = peer_of(fd);
    ASSERT_OK(peer);
    EXPECT_EQ(peer.value().pid, ::getpid());
    EXPECT_EQ(peer.value().uid, ::geteuid());
  }
}

TEST_F(UnixSocketTest, NobodyThereIsUnavailable) {
  EXPECT_EQ(connect_to(folder_ / "nothing", deadline_in(1)).status().code(), Code::kUnavailable);
  listener_.reset();  // the file stays: a daemon that was killed leaves one
  EXPECT_EQ(connect_to(path_, deadline_in(1)).status().code(), Code::kUnavailable);
}

TEST_F(UnixSocketTest, AFullBacklogEndsInATimeout) {
  std::vector<UniqueFd> waiting;
  Status last;
  while (last.ok() && waiting.size() < 10000) {
    Result<UniqueFd> fd = connect_to(path_, deadline_in(0.05));
    last = fd.status();
    if (fd.ok()) waiting.push_back(std::move(fd).value());
  }
  EXPECT_EQ(last.code(), Code::kTimeout) << last.to_string();
}

TEST_F(UnixSocketTest, ALongPathSaysWhatToDo) {
  Result<UniqueFd> listener = listen_at(folder_ / std::string(120, 'p'));
  EXPECT_EQ(listener.status().code(), Code::kInvalid);
  EXPECT_NE(listener.status().message().find("OVERMIND_RUNTIME_DIR"), std::string::npos);
}

}  // namespace
}  // namespace overmind
