// SPDX-License-Identifier: MIT
#include "core/manifest.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <limits>

#include "core/segment_format.h"
#include "tests/core/testing.h"

namespace overmind {
namespace {

using segment_format::Header;
using segment_format::RawRange;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

Manifest draft() {
  Manifest manifest;
  for (std::size_t i = 0; i < manifest.key.size(); ++i) manifest.key[i] = static_cast<std::uint8_t>(i);
  manifest.id = 0x0123456789abcdef;
  manifest.created_ns = 1'700'000'000'000'000'000;
  manifest.native_ns = 1'234'567'890;
  manifest.loader = "torch.load";
  manifest.target = "/models/Grüße.bin";
  return manifest;
}

const std::vector<std::uint64_t> kSizes = {1, 0, 64, 65, kPageAlignFrom - 1, kPageAlignFrom, 3, kPageAlign * 20 + 1};

// A whole valid segment in memory; a test spoils one thing and says what must be complained about.
class Segment {
 public:
  explicit Segment(std::span<const std::uint64_t> sizes = kSizes) {
    Result<SegmentPlan> plan =
        plan_segment(draft(), bytes_of("{\"m\":1}"), bytes_of("pickle"), bytes_of("tensor records"), sizes);
    EXPECT_TRUE(plan.ok());
    plan_ = std::move(plan).value();
    bytes_ = plan_.head;
  }

  Header header() const {
    Header header;
    std::memcpy(&header, bytes_.data(), sizeof header);
    return header;
  }
  void put_header(Header header, bool with_checksum = true) {
    if (with_checksum) header.checksum = segment_format::checksum(header);
    std::memcpy(bytes_.data(), &header, sizeof header);
  }
  void change(const std::function<void(Header&)>& edit) {
    Header changed = header();
    edit(changed);
    put_header(changed);
  }
  void change_buffer(std::size_t index, const std::function<void(RawRange&)>& edit) {
    std::byte* place = bytes_.data() + header().buffers.offset + index * sizeof(RawRange);
    RawRange range;
    std::memcpy(&range, place, sizeof range);
    edit(range);
    std::memcpy(place, &range, sizeof range);
  }

  Result<Manifest> parse() const { return parse_manifest(bytes_, plan_.total_size); }
  std::vector<std::byte>& bytes() { return bytes_; }
  const SegmentPlan& plan() const { return plan_; }

 private:
  SegmentPlan plan_;
  std::vector<std::byte> bytes_;
};

void expect_invalid(const Result<Manifest>& result, std::string_view complaint) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), Code::kInvalid);
  EXPECT_NE(result.status().message().find(complaint), std::string::npos) << result.status().message();
}

TEST(Manifest, ComesBackAsPlanned) {
  const Segment segment;
  Result<Manifest> parsed = segment.parse();
  ASSERT_OK(parsed);
  const Manifest& manifest = parsed.value();
  const Manifest wanted = draft();
  EXPECT_EQ(manifest.key, wanted.key);
  EXPECT_EQ(manifest.id, wanted.id);
  EXPECT_EQ(manifest.created_ns, wanted.created_ns);
  EXPECT_EQ(manifest.native_ns, wanted.native_ns);
  EXPECT_EQ(manifest.loader, wanted.loader);
  EXPECT_EQ(manifest.target, wanted.target);
  EXPECT_EQ(manifest.total_size, segment.plan().total_size);
  const auto text = [&](Range range) {
    return std::string(reinterpret_cast<const char*>(segment.plan().head.data() + range.offset), range.size);
  };
  EXPECT_EQ(text(manifest.meta), "{\"m\":1}");
  EXPECT_EQ(text(manifest.skeleton), "pickle");
  EXPECT_EQ(text(manifest.tensors), "tensor records");
  ASSERT_EQ(manifest.buffers.size(), kSizes.size());
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    EXPECT_EQ(manifest.buffers[i].size, kSizes[i]);
    EXPECT_EQ(manifest.buffers[i].offset, segment.plan().buffers[i].offset);
  }
}

TEST(Manifest, PlacesBuffersAlignedInOrderWithoutOverlap) {
  const Segment segment;
  std::uint64_t end = segment.plan().head.size();
  for (const Range& buffer : segment.plan().buffers) {
    EXPECT_GE(buffer.offset, end);
    EXPECT_EQ(buffer.offset % (buffer.size >= kPageAlignFrom ? kPageAlign : kBufferAlign), 0u);
    EXPECT_LT(buffer.offset - end, kPageAlign);
    end = buffer.offset + buffer.size;
  }
  EXPECT_EQ(end, segment.plan().total_size);
}

TEST(Manifest, PlacesBuffersAsTheyLie) {
  std::vector<std::uint64_t> addresses;
  for (std::size_t i = 0; i < kSizes.size(); ++i) addresses.push_back((std::uint64_t{0x7f00} << 24) + i * 8 + 1);
  const SegmentPlan plan = plan_segment(draft(), {}, {}, {}, kSizes, addresses).value();
  std::uint64_t end = plan.head.size();
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    const Range buffer = plan.buffers[i];
    EXPECT_GE(buffer.offset, end);
    EXPECT_EQ(buffer.offset % kBufferAlign, buffer.size == 0 ? 0 : addresses[i] % kBufferAlign);
    EXPECT_TRUE(buffer.size < kPageAlignFrom || buffer.offset % kPageAlign < kBufferAlign);
    end = buffer.offset + buffer.size;
  }
  EXPECT_EQ(end, plan.total_size);
  Result<Manifest> parsed = parse_manifest(plan.head, plan.total_size);
  ASSERT_OK(parsed);
  EXPECT_EQ(parsed.value().buffers.back().offset, plan.buffers.back().offset);
}

TEST(Manifest, AllParts_MayBeEmpty) {
  Manifest empty;
  Result<SegmentPlan> plan = plan_segment(empty, {}, {}, {}, {});
  ASSERT_OK(plan);
  EXPECT_EQ(plan.value().total_size, plan.value().head.size());
  ASSERT_OK(parse_manifest(plan.value().head, plan.value().total_size));
}

// FORMAT.md shows these bytes.
TEST(Manifest, HasTheBytesOfTheDocument) {
  Manifest small;
  small.id = 0x0102030405060708;
  small.created_ns = 10;
  small.native_ns = 11;
  small.key.fill(0xAA);
  small.loader = "f";
  small.target = "/m";
  const std::vector<std::uint64_t> sizes = {5};
  Result<SegmentPlan> plan = plan_segment(small, bytes_of("{}"), bytes_of("N."), {}, sizes);
  ASSERT_OK(plan);
  const std::vector<std::byte>& head = plan.value().head;
  ASSERT_EQ(head.size(), 226u);
  EXPECT_EQ(plan.value().total_size, 261u);
  EXPECT_EQ(std::memcmp(head.data(), "OVMDSEG\n\x01\0\0\0\xC0\0\0\0", 16), 0);
  EXPECT_EQ(std::memcmp(head.data() + 24, "\x05\x01\0\0\0\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01", 16), 0);
  EXPECT_EQ(std::memcmp(head.data() + 192, "f/m\0\0\0\0\0{}\0\0\0\0\0\0", 16), 0);
  EXPECT_EQ(std::memcmp(head.data() + 208, "\0\x01\0\0\0\0\0\0\x05\0\0\0\0\0\0\0N.", 18), 0);
}

TEST(Manifest, NeedsOnlyThePrefixThatItReads) {
  const Segment segment;
  const Header header = segment.header();
  const std::size_t needed = header.buffers.offset + header.buffers.size;
  ASSERT_OK(parse_manifest(std::span(segment.plan().head).first(needed), segment.plan().total_size));
  for (std::size_t size = 0; size < needed; ++size) {
    // A copy of exactly this size, so that the sanitizer sees a read past it.
    const std::vector<std::byte> prefix(segment.plan().head.begin(),
                                        segment.plan().head.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_FALSE(parse_manifest(prefix, segment.plan().total_size).ok()) << size;
  }
}

TEST(Manifest, NeverReadsPastThePrefix) {
  const Segment segment;
  // The prefix ends where an unreadable page begins: one byte too far is a SIGSEGV, sanitizer or not.
  auto* pages = static_cast<std::byte*>(
      ::mmap(nullptr, 2 * kPageAlign, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(::mprotect(pages + kPageAlign, kPageAlign, PROT_NONE), 0);
  for (std::size_t size = 0; size <= segment.plan().head.size(); ++size) {
    std::byte* prefix = pages + kPageAlign - size;
    if (size != 0) std::memcpy(prefix, segment.plan().head.data(), size);
    (void)parse_manifest({prefix, size}, segment.plan().total_size);
  }
  ::munmap(pages, 2 * kPageAlign);
}

TEST(ManifestRefuses, Nothing) { expect_invalid(parse_manifest({}, 0), "shorter than its header"); }

TEST(ManifestRefuses, AWrongMagic) {
  Segment segment;
  segment.change([](Header& header) { header.magic[3] = 'x'; });
  expect_invalid(segment.parse(), "magic");
}

TEST(ManifestRefuses, AnotherVersion) {
  Segment segment;
  segment.change([](Header& header) { header.version = 2; });
  expect_invalid(segment.parse(), "format version 2, this is 1");
}

TEST(ManifestRefuses, AnotherHeaderSize) {
  Segment segment;
  segment.change([](Header& header) { header.header_size = 184; });
  expect_invalid(segment.parse(), "header size");
}

TEST(ManifestRefuses, AFlippedBitAnywhereInTheHeader) {
  const Segment good;
  for (std::size_t bit = 0; bit < sizeof(Header) * 8; ++bit) {
    Segment segment;
    segment.bytes()[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    EXPECT_FALSE(segment.parse().ok()) << bit;
  }
}

TEST(ManifestRefuses, AWrongChecksum) {
  Segment segment;
  Header header = segment.header();
  header.native_ns += 1;
  segment.put_header(header, false);
  expect_invalid(segment.parse(), "checksum");
}

TEST(ManifestRefuses, AReservedFieldThatIsSet) {
  Segment segment;
  segment.change([](Header& header) { header.reserved = 1; });
  expect_invalid(segment.parse(), "reserved");
}

TEST(ManifestRefuses, ASegmentOfAnotherSize) {
  const Segment segment;
  for (const std::int64_t off : {-1, 1}) {
    const std::uint64_t size = segment.plan().total_size + static_cast<std::uint64_t>(off);
    expect_invalid(parse_manifest(segment.plan().head, size), "bytes, has " + std::to_string(size));
  }
}

TEST(ManifestRefuses, ASizePast63Bits) {
  Segment segment;
  segment.change([](Header& header) { header.total_size = std::uint64_t{1} << 63; });
  expect_invalid(parse_manifest(segment.bytes(), std::uint64_t{1} << 63), "overflows");
}

struct Part {
  const char* name;
  RawRange Header::*range;
  std::uint64_t alignment;
};
const Part kParts[] = {
    {"loader", &Header::loader, 1},   {"target", &Header::target, 1},        {"meta", &Header::meta, 8},
    {"tensors", &Header::tensors, 8}, {"buffer table", &Header::buffers, 8}, {"skeleton", &Header::skeleton, 8},
};

TEST(ManifestRefuses, APartThatIsNotAligned) {
  for (const Part& part : kParts) {
    if (part.alignment == 1) continue;
    Segment segment;
    segment.change([&](Header& header) { (header.*part.range).offset += 1; });
    expect_invalid(segment.parse(), std::string(part.name) + " (offset");
    expect_invalid(segment.parse(), "not aligned to 8");
  }
}

TEST(ManifestRefuses, APartThatOverlapsTheOneBefore) {
  for (const Part& part : kParts) {
    Segment segment;
    segment.change([&](Header& header) { (header.*part.range).offset -= part.alignment; });
    expect_invalid(segment.parse(), std::string(part.name) + " (offset");
    expect_invalid(segment.parse(), "overlaps");
  }
}

TEST(ManifestRefuses, PartsOutOfOrder) {
  Segment segment;
  segment.change([](Header& header) { std::swap(header.meta, header.tensors); });
  expect_invalid(segment.parse(), "tensors (offset");
}

TEST(ManifestRefuses, APartThatEndsAfterTheSegment) {
  for (const Part& part : kParts) {
    Segment segment;
    segment.change([&](Header& header) { (header.*part.range).size = header.total_size; });
    expect_invalid(segment.parse(), std::string(part.name) + " (offset");
    expect_invalid(segment.parse(), "ends after the segment");
  }
}

TEST(ManifestRefuses, APartThatBeginsAfterTheSegment) {
  for (const Part& part : kParts) {
    Segment segment;
    segment.change([&](Header& header) { (header.*part.range) = {(header.total_size + 16) & ~std::uint64_t{7}, 0}; });
    expect_invalid(segment.parse(), "ends after the segment");
  }
}

TEST(ManifestRefuses, APartWhoseEndOverflows) {
  for (const Part& part : kParts) {
    Segment segment;
    segment.change(
        [&](Header& header) { (header.*part.range).size = ~std::uint64_t{0} - (header.*part.range).offset + 9; });
    expect_invalid(segment.parse(), "ends after the segment");
  }
}

TEST(ManifestRefuses, ALongString) {
  for (RawRange Header::*part : {&Header::loader, &Header::target}) {
    Segment segment;
    segment.change([&](Header& header) {
      header.loader = {sizeof(Header), 0};
      header.target = {sizeof(Header), 0};
      (header.*part).size = kMaxString + 1;
      std::uint64_t at = 8192;
      if (part == &Header::loader) header.target.offset = at;
      for (RawRange* rest : {&header.meta, &header.tensors, &header.buffers, &header.skeleton}) *rest = {at, 0};
    });
    expect_invalid(segment.parse(), "longer than 4096");
  }
}

TEST(ManifestRefuses, AStringThatIsNotUtf8) {
  for (const std::string_view text : {"\x80", "\xC0\xAF", "\xC3", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
                                      "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "\xFF", "\xC3\x28"}) {
    Manifest bad = draft();
    bad.target = "0123456789";
    Result<SegmentPlan> plan = plan_segment(bad, {}, {}, {}, {});
    ASSERT_OK(plan);
    std::vector<std::byte> bytes = plan.value().head;
    Header header;
    std::memcpy(&header, bytes.data(), sizeof header);
    const std::size_t end = header.target.offset + header.target.size;
    std::memcpy(bytes.data() + end - text.size(), text.data(), text.size());
    expect_invalid(parse_manifest(bytes, plan.value().total_size), "target is not UTF-8");
    bad.target = std::string(text) + "x";
    EXPECT_EQ(plan_segment(bad, {}, {}, {}, {}).status().code(), Code::kInvalid);
  }
}

TEST(ManifestRefuses, HalfAPairInTheBufferTable) {
  Segment segment;
  segment.change([](Header& header) { header.buffers.size -= 8; });
  expect_invalid(segment.parse(), "whole number of pairs");
}

TEST(ManifestRefuses, MoreBuffersThanTheLimit) {
  Segment segment;
  const std::uint64_t table = (kMaxBuffers + 1) * sizeof(RawRange);
  const std::uint64_t total = std::uint64_t{1} << 40;
  segment.change([&](Header& header) {
    header.total_size = total;
    header.buffers.size = table;
    header.skeleton = {header.buffers.offset + table, 0};
  });
  expect_invalid(parse_manifest(segment.bytes(), total), "more than 4194304 buffers");
}

TEST(ManifestRefuses, ABigBufferThatIsNotPageAligned) {
  Segment segment;
  segment.change_buffer(5, [](RawRange& range) { range.offset += 64; });
  expect_invalid(segment.parse(), "not page-aligned (number 5)");
}

TEST(ManifestRefuses, BuffersThatOverlap) {
  Segment segment;
  segment.change_buffer(2, [](RawRange& range) { range.size += 64; });
  expect_invalid(segment.parse(), "overlaps what is before it or is out of order (number 3)");
}

TEST(ManifestRefuses, BuffersOutOfOrder) {
  const std::vector<std::uint64_t> sizes = {64, 64};
  Segment segment(sizes);
  const std::vector<Range> planned = segment.plan().buffers;
  for (const std::size_t i : {0u, 1u}) {
    segment.change_buffer(i, [&](RawRange& range) { range.offset = planned[1 - i].offset; });
  }
  expect_invalid(segment.parse(), "out of order (number 1)");
}

TEST(ManifestRefuses, ABufferInsideTheHead) {
  Segment segment;
  segment.change_buffer(0, [](RawRange& range) { range.offset = 64; });
  expect_invalid(segment.parse(), "(number 0)");
}

TEST(ManifestRefuses, ABufferThatEndsAfterTheSegment) {
  Segment segment;
  segment.change_buffer(kSizes.size() - 1, [](RawRange& range) { range.size += 1; });
  expect_invalid(segment.parse(), "ends after the segment (number 7)");
}

TEST(ManifestRefuses, ABufferWhoseEndOverflows) {
  Segment segment;
  segment.change_buffer(kSizes.size() - 1, [](RawRange& range) { range.size = ~std::uint64_t{0} - range.offset + 1; });
  expect_invalid(segment.parse(), "ends after the segment (number 7)");
}

TEST(PlanRefuses, ALongString) {
  Manifest manifest = draft();
  manifest.loader.assign(kMaxString, 'x');
  ASSERT_OK(plan_segment(manifest, {}, {}, {}, {}));
  manifest.loader += 'x';
  EXPECT_EQ(plan_segment(manifest, {}, {}, {}, {}).status().code(), Code::kInvalid);
}

TEST(PlanRefuses, TooManyBuffers) {
  const std::vector<std::uint64_t> sizes(kMaxBuffers + 1, 0);
  EXPECT_EQ(plan_segment(draft(), {}, {}, {}, sizes).status().code(), Code::kInvalid);
}

TEST(PlanRefuses, SizesThatOverflow) {
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  for (const std::vector<std::uint64_t>& sizes :
       {std::vector<std::uint64_t>{most}, {most / 2}, {most / 4, most / 4, 4096}, {most - 1000, 2000}}) {
    EXPECT_EQ(plan_segment(draft(), {}, {}, {}, sizes).status().code(), Code::kExhausted);
  }
}

TEST(Manifest, OfManyBuffersIsQuick) {
  const std::vector<std::uint64_t> sizes(70'000, 4);
  const auto start = std::chrono::steady_clock::now();
  const Segment segment(sizes);
  Result<Manifest> parsed = segment.parse();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  ASSERT_OK(parsed);
  EXPECT_EQ(parsed.value().buffers.size(), sizes.size());
  EXPECT_LT(segment.plan().total_size, std::uint64_t{6} << 20);  // small ones share pages
  EXPECT_LT(took.count(), 2.0);  // some ms; a check of each against each would take minutes under a sanitizer
}

TEST(EntryIdText, GoesThereAndBack) {
  for (const EntryId id : {EntryId{0}, EntryId{1}, EntryId{0xfedcba9876543210}, ~EntryId{0}}) {
    const std::string text = entry_id_to_string(id);
    EXPECT_EQ(text.size(), 16u);
    Result<EntryId> back = entry_id_from_string(text);
    ASSERT_OK(back);
    EXPECT_EQ(back.value(), id);
  }
  EXPECT_EQ(entry_id_to_string(0xAB), "00000000000000ab");
}

TEST(EntryIdText, RefusesAllElse) {
  for (const std::string_view text : {"", "ab", "00000000000000a", "00000000000000abc", "0x000000000000ab",
                                      "-0000000000000ab", " 000000000000000", "000000000000000 ", "00000000000000zz"}) {
    EXPECT_EQ(entry_id_from_string(text).status().code(), Code::kInvalid) << text;
  }
}

}  // namespace
}  // namespace overmind
