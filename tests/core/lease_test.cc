// SPDX-License-Identifier: MIT
#include "core/lease.h"

#include <gtest/gtest.h>

#include "core/segment.h"
#include "tests/core/testing.h"

namespace overmind {
namespace {

using std::chrono::seconds;

class LeaseTest : public ::testing::Test {
 protected:
  Waiter waiter(ConnectionId id, bool wants_lease = true, int in_seconds = 10) {
    return {id, id, wants_lease, now_ + seconds(in_seconds)};
  }
  Key key_{1}, other_{2};
  Deadline now_ = std::chrono::steady_clock::now();
  LeaseTable table_;
};

TEST_F(LeaseTest, GrantedOnceAndFound) {
  ActiveLease& lease = table_.grant(key_, 5, now_);
  EXPECT_NE(lease.token, 0u);
  EXPECT_EQ(table_.find(key_), &lease);
  EXPECT_EQ(table_.find_token(lease.token), &lease);
  EXPECT_EQ(table_.find(other_), nullptr);
  EXPECT_EQ(table_.find_token(lease.token + 1), nullptr);
  EXPECT_EQ(table_.held_by(5), std::vector<Key>{key_});
  EXPECT_TRUE(table_.held_by(6).empty());
}

TEST_F(LeaseTest, TheFirstWhoWantsItInherits) {
  ActiveLease& lease = table_.grant(key_, 5, now_);
  std::uint64_t old = lease.token;
  lease.waiters = {waiter(6, false), waiter(7), waiter(8)};
  LeaseTable::Passed passed = table_.pass_on(key_, now_);
  ASSERT_TRUE(passed.heir);
  EXPECT_EQ(passed.heir->connection, 7u);
  EXPECT_TRUE(passed.idle.empty());
  EXPECT_NE(passed.token, old);
  EXPECT_EQ(table_.find_token(old), nullptr);
  EXPECT_EQ(table_.find(key_)->holder, 7u);
  EXPECT_TRUE(table_.is_waiting(6));
  EXPECT_FALSE(table_.is_waiting(7));
  EXPECT_TRUE(table_.is_waiting(8));
}

TEST_F(LeaseTest, WithoutAnHeirItIsOver) {
  table_.grant(key_, 5, now_).waiters = {waiter(6, false)};
  LeaseTable::Passed passed = table_.pass_on(key_, now_);
  EXPECT_FALSE(passed.heir);
  ASSERT_EQ(passed.idle.size(), 1u);
  EXPECT_EQ(passed.idle.front().connection, 6u);
  EXPECT_EQ(table_.find(key_), nullptr);
}

TEST_F(LeaseTest, WaitsExpire) {
  table_.grant(key_, 5, now_).waiters = {waiter(6, true, 10), waiter(7, true, 3)};
  table_.grant(other_, 5, now_).waiters = {waiter(8, true, 5)};
  EXPECT_EQ(table_.next_deadline(), now_ + seconds(3));
  EXPECT_TRUE(table_.take_expired(now_).empty());
  std::vector<LeaseTable::Expired> expired = table_.take_expired(now_ + seconds(5));
  ASSERT_EQ(expired.size(), 2u);
  EXPECT_EQ(expired[0].waiter.connection, 7u);
  EXPECT_DOUBLE_EQ(expired[0].busy.elapsed_seconds, 5);
  EXPECT_EQ(expired[1].waiter.connection, 8u);
  EXPECT_EQ(table_.next_deadline(), now_ + seconds(10));
  table_.forget_waiter(6);
  EXPECT_EQ(table_.next_deadline(), std::nullopt);
}

TEST_F(LeaseTest, FinishingGivesTheWaiters) {
  table_.grant(key_, 5, now_).waiters = {waiter(6), waiter(7)};
  EXPECT_EQ(table_.finish(key_).size(), 2u);
  EXPECT_EQ(table_.find(key_), nullptr);
  EXPECT_TRUE(table_.finish(key_).empty());
}

TEST_F(LeaseTest, ProgressIsWhatTheMemoryFileHolds) {
  constexpr std::uint64_t kSize = 8 << 20;
  ActiveLease& lease = table_.grant(key_, 5, now_);
  EXPECT_FALSE(lease.progress(now_ + seconds(2)).publishing);
  Snapshot snapshot;
  snapshot.request.total = kSize;
  snapshot.request.native_ns = 2'500'000'000;
  snapshot.fd = create_segment("test", kSize).value();
  int fd = snapshot.fd.get();
  lease.snapshot = std::move(snapshot);
  EXPECT_EQ(table_.reserved(), kSize);
  EXPECT_EQ(table_.publishing().size(), 1u);
  EXPECT_EQ(lease.progress(now_).written, 0u);
  std::vector<char> bytes(kSize / 2, 'x');
  ASSERT_EQ(::pwrite(fd, bytes.data(), bytes.size() / 2, 0), static_cast<ssize_t>(bytes.size() / 2));
  Busy first = lease.progress(now_ + seconds(1));
  EXPECT_EQ(first.written, kSize / 4);
  EXPECT_DOUBLE_EQ(first.bytes_per_second, 0);
  ASSERT_EQ(::pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  Busy second = lease.progress(now_ + seconds(3));
  EXPECT_TRUE(second.publishing);
  EXPECT_EQ(second.written, kSize / 2);
  EXPECT_DOUBLE_EQ(second.bytes_per_second, static_cast<double>(kSize) / 8);
  EXPECT_DOUBLE_EQ(second.native_seconds, 2.5);
}

}  // namespace
}  // namespace overmind
