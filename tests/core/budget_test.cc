// SPDX-License-Identifier: MIT
#include "core/budget.h"

#include <gtest/gtest.h>

#include "tests/core/testing.h"

namespace overmind {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

class BudgetTest : public ::testing::Test {
 protected:
  // Ids in the order of use.
  void put(EntryId id, std::uint64_t mib) {
    Entry entry;
    entry.id = id;
    entry.key[0] = static_cast<std::uint8_t>(id);
    entry.nbytes = mib * kMiB;
    entry.last_used = static_cast<double>(id);
    catalog_.put(std::move(entry));
  }
  Result<std::vector<EntryId>> room_for(std::uint64_t mib, std::uint64_t reserved = 0,
                                        std::uint64_t available = 100000) {
    return make_room(catalog_, limits_,
                     {.bytes = mib * kMiB,
                      .reserved = reserved * kMiB,
                      .unwritten = reserved * kMiB,
                      .snapshots = 0,
                      .available = available * kMiB});
  }
  std::vector<EntryId> evicted_for(std::uint64_t mib, std::uint64_t reserved = 0, std::uint64_t available = 100000) {
    auto room = room_for(mib, reserved, available);
    EXPECT_TRUE(room.ok()) << room.status().to_string();
    return room.ok() ? room.value() : std::vector<EntryId>{0};
  }
  std::string refusal(std::uint64_t mib, std::uint64_t reserved = 0, std::uint64_t available = 100000) {
    auto room = room_for(mib, reserved, available);
    EXPECT_EQ(room.status().code(), Code::kExhausted);
    return room.status().message();
  }
  using Ids = std::vector<EntryId>;

  Catalog catalog_;
  Limits limits_{.budget = 1000 * kMiB, .entries = 100};
};

TEST_F(BudgetTest, NothingGoesWhileThereIsRoom) {
  put(1, 400);
  EXPECT_EQ(evicted_for(600), Ids{});
}

TEST_F(BudgetTest, TheLeastRecentlyUsedGoFirstAndNoMoreThanNeeded) {
  put(1, 300), put(2, 300), put(3, 300);
  EXPECT_EQ(evicted_for(101), Ids{1});
  EXPECT_EQ(evicted_for(600), (Ids{1, 2}));
  catalog_.use(1, 100, true);
  EXPECT_EQ(evicted_for(101), Ids{2});
  EXPECT_EQ(evicted_for(1000), (Ids{2, 3, 1}));
}

TEST_F(BudgetTest, PinnedAndMappedOnesStay) {
  put(1, 300), put(2, 300), put(3, 300);
  catalog_.pin(1, true);
  catalog_.map(2);
  EXPECT_EQ(evicted_for(400), Ids{3});
  EXPECT_EQ(refusal(401),
            "needs 401.0 MiB; budget 1000.0 MiB, of which 300.0 MiB is pinned and 300.0 MiB is in use by running "
            "processes; raise OVERMIND_BUDGET or drop entries");
}

TEST_F(BudgetTest, GhostsAndReservationsCount) {
  put(1, 300), put(2, 300);
  catalog_.map(1);
  catalog_.remove(1);
  EXPECT_EQ(evicted_for(400), Ids{});
  EXPECT_EQ(evicted_for(401), Ids{2});
  EXPECT_EQ(evicted_for(400, 300), Ids{2});
  EXPECT_NE(refusal(401, 300).find("300.0 MiB is being written"), std::string::npos);
}

TEST_F(BudgetTest, NothingGoesForWhatCannotFit) {
  put(1, 300);
  EXPECT_EQ(refusal(1001), "needs 1001.0 MiB; budget 1000.0 MiB; raise OVERMIND_BUDGET or drop entries");
  Demand absurd{.bytes = ~std::uint64_t{0}, .available = ~std::uint64_t{0}};
  EXPECT_FALSE(make_room(catalog_, limits_, absurd).ok());
}

TEST_F(BudgetTest, TheMachinesMemoryLimitsToo) {
  put(1, 300);
  EXPECT_EQ(evicted_for(200, 0, 200), Ids{});
  EXPECT_EQ(evicted_for(200, 0, 100), Ids{1});
  EXPECT_EQ(evicted_for(200, 100, 200), Ids{1});  // promised memory is spent memory
  EXPECT_NE(refusal(500, 0, 100).find("has 400.0 MiB of memory to give"), std::string::npos);
}

TEST_F(BudgetTest, DescriptorsAreABudgetToo) {
  limits_.entries = 3;
  put(1, 1), put(2, 1), put(3, 1);
  EXPECT_EQ(evicted_for(1), Ids{1});
  for (EntryId id : {1, 2, 3}) catalog_.map(id);
  EXPECT_EQ(evicted_for(1), Ids{1});  // mapped, but its descriptor is what is needed
  for (EntryId id : {1, 2, 3}) catalog_.pin(id, true);
  limits_.files = 30;
  EXPECT_EQ(
      refusal(1),
      "the daemon's limit of 30 open files leaves room for 3 entries; raise `ulimit -Hn`, then `overmind stop`, or "
      "unpin entries");
  limits_.entries = 1;
  EXPECT_EQ(files_reason(limits_),
            "the daemon's limit of 30 open files leaves room for 1 entry; raise `ulimit -Hn`, then `overmind stop`");
}

TEST_F(BudgetTest, PressureTakesUnmappedOnesOnly) {
  put(1, 100), put(2, 100), put(3, 100);
  catalog_.map(1);
  catalog_.pin(3, true);
  EXPECT_EQ(relieve(catalog_, 1), Ids{2});
  EXPECT_EQ(relieve(catalog_, 1000 * kMiB), Ids{2});
  EXPECT_EQ(relieve(catalog_, 0), Ids{});
}

TEST(HumanBytesTest, Reads) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(std::uint64_t{9} << 30 | 100 << 20), "9.1 GiB");
}

}  // namespace
}  // namespace overmind
