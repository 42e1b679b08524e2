// SPDX-License-Identifier: MIT
#include "core/catalog.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "core/segment.h"
#include "tests/core/testing.h"

namespace overmind {
namespace {

Key key(std::uint8_t number) {
  Key key{};
  key[0] = number;
  return key;
}

class CatalogTest : public ::testing::Test {
 protected:
  const Entry& put(EntryId id, std::uint64_t nbytes = 100) {
    Entry entry;
    entry.id = id;
    entry.key = key(static_cast<std::uint8_t>(id));
    entry.nbytes = nbytes;
    return catalog_.put(std::move(entry));
  }
  Catalog catalog_;
};

TEST_F(CatalogTest, FoundByIdAndByKey) {
  put(3);
  ASSERT_NE(catalog_.find(EntryId{3}), nullptr);
  EXPECT_EQ(catalog_.find(key(3)), catalog_.find(EntryId{3}));
  EXPECT_EQ(catalog_.find(key(4)), nullptr);
  EXPECT_TRUE(catalog_.remove(3));
  EXPECT_FALSE(catalog_.remove(3));
  EXPECT_EQ(catalog_.find(key(3)), nullptr);
  EXPECT_EQ(catalog_.find(EntryId{3}), nullptr);
}

TEST_F(CatalogTest, BytesAreAccounted) {
  put(1, 100), put(2, 20), put(3, 3);
  catalog_.pin(2, true);
  catalog_.map(3);
  Catalog::Bytes bytes = catalog_.bytes();
  EXPECT_EQ(bytes.committed, 123u);
  EXPECT_EQ(bytes.pinned, 20u);
  EXPECT_EQ(bytes.mapped, 3u);
  EXPECT_EQ(bytes.ghosts, 0u);
}

TEST_F(CatalogTest, AMappedEntryLeavesAGhostUntilTheLastUnmaps) {
  put(1, 100);
  catalog_.map(1), catalog_.map(1);
  catalog_.remove(1);
  EXPECT_EQ(catalog_.bytes().ghosts, 100u);
  EXPECT_EQ(catalog_.bytes().mapped, 100u);
  catalog_.unmap(1);
  EXPECT_EQ(catalog_.bytes().ghosts, 100u);
  catalog_.unmap(1);
  EXPECT_EQ(catalog_.bytes().ghosts, 0u);
  catalog_.unmap(1);  // once too often is nothing
}

TEST_F(CatalogTest, AnUnmappedEntryLeavesNoGhost) {
  put(1, 100);
  catalog_.map(1), catalog_.unmap(1);
  catalog_.remove(1);
  EXPECT_EQ(catalog_.bytes().ghosts, 0u);
}

TEST_F(CatalogTest, UseCountsHitsAndTimes) {
  const Entry& entry = put(1);
  catalog_.use(1, 50, true);
  catalog_.use(1, 60, false);
  EXPECT_EQ(entry.hits, 1u);
  EXPECT_DOUBLE_EQ(entry.info().last_used, 60);
  catalog_.use(99, 70, true);
  EXPECT_FALSE(catalog_.pin(99, true));
}

// ---- read_entry

struct Made {
  UniqueFd fd;
  SegmentPlan plan;
};

Made make_segment(std::size_t buffers = 3) {
  Manifest draft;
  draft.key = key(9);
  draft.id = 77;
  draft.created_ns = 5'000'000'000;
  draft.loader = "loader";
  draft.target = "target";
  std::vector<std::uint64_t> sizes(buffers, 1);
  Made made{UniqueFd(), plan_segment(draft, {}, {}, {}, sizes).value()};
  made.fd = create_segment("test", made.plan.total_size).value();
  char byte = 'b';
  std::vector<Source> sources(buffers, Source{&byte, 1});
  EXPECT_TRUE(write_segment(made.fd.get(), made.plan, sources).ok());
  return made;
}

TEST(ReadEntryTest, ReadsWhatTheCatalogNeeds) {
  for (std::size_t buffers : {3, 5000, 100000}) {  // heads of a page, of some, of more than two reads
    Made made = make_segment(buffers);
    ASSERT_OK(seal_segment(made.fd.get()));
    Result<Entry> entry = read_entry(std::move(made.fd));
    ASSERT_OK(entry);
    EXPECT_EQ(entry.value().id, 77u);
    EXPECT_EQ(entry.value().key, key(9));
    EXPECT_EQ(entry.value().nbytes, made.plan.total_size);
    EXPECT_EQ(entry.value().loader, "loader");
    EXPECT_DOUBLE_EQ(entry.value().info().created, 5);
    EXPECT_TRUE(entry.value().fd.valid());
  }
}

TEST(ReadEntryTest, RefusesWhatIsNotSealed) {
  Made made = make_segment();
  ::fcntl(made.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  Result<Entry> entry = read_entry(std::move(made.fd));
  EXPECT_EQ(entry.status().code(), Code::kInvalid);
  EXPECT_NE(entry.status().message().find("not sealed"), std::string::npos);
}

TEST(ReadEntryTest, RefusesABadManifestAndAnEmptyOne) {
  Made made = make_segment();
  ASSERT_EQ(::pwrite(made.fd.get(), "junk", 4, 40), 4);
  ASSERT_OK(seal_segment(made.fd.get()));
  EXPECT_EQ(read_entry(std::move(made.fd)).status().code(), Code::kInvalid);
  UniqueFd zeros = create_segment("test", 1 << 20).value();
  ASSERT_OK(seal_segment(zeros.get()));
  EXPECT_EQ(read_entry(std::move(zeros)).status().code(), Code::kInvalid);
}

TEST(ReadEntryTest, RefusesWhatIsNoMemoryFile) {
  testing::TempDir folder;
  EXPECT_EQ(read_entry(UniqueFd(::open((folder / "file").c_str(), O_RDWR | O_CREAT, 0600))).status().code(),
            Code::kInvalid);
  EXPECT_EQ(read_entry(UniqueFd()).status().code(), Code::kInvalid);
}

}  // namespace
}  // namespace overmind
