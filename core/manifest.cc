// SPDX-License-Identifier: MIT
// The writer and the only reader of FORMAT.md. The reader trusts nothing: every number is compared
// with the true size of the segment before it is used, and every sum is checked for overflow.
#include "core/manifest.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>

#include "core/segment_format.h"

namespace overmind {
namespace {

using segment_format::Header;
using segment_format::RawRange;

// off_t is signed: a larger segment cannot be made.
constexpr std::uint64_t kMaxSegment = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

Status invalid(std::string what) { return Status(Code::kInvalid, "segment: " + std::move(what)); }

// Continuation bytes that follow `lead`, or -1; `low`..`high` bounds the first of them (no overlong
// form, no surrogate, nothing past U+10FFFF).
int continuation(std::uint8_t lead, std::uint8_t& low, std::uint8_t& high) {
  low = 0x80, high = 0xBF;
  if (lead < 0x80) return 0;
  if (lead >= 0xC2 && lead <= 0xDF) return 1;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
    return 2;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
    return 3;
  }
  return -1;
}

// JSON, CBOR and Python str all refuse other bytes; refusing them here keeps that out of every consumer.
bool is_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    std::uint8_t low, high;
    const int more = continuation(static_cast<std::uint8_t>(text[at++]), low, high);
    if (more < 0 || text.size() - at < static_cast<std::size_t>(more)) return false;
    for (int i = 0; i < more; ++i, low = 0x80, high = 0xBF) {
      const auto byte = static_cast<std::uint8_t>(text[at++]);
      if (byte < low || byte > high) return false;
    }
  }
  return true;
}

// False when the sum or the rounding leaves kMaxSegment.
bool align_up(std::uint64_t& value, std::uint64_t alignment) {
  if (value > kMaxSegment - (alignment - 1)) return false;
  value = (value + alignment - 1) & ~(alignment - 1);
  return true;
}

bool advance(std::uint64_t& value, std::uint64_t size) {
  if (size > kMaxSegment - value) return false;
  value += size;
  return true;
}

std::uint64_t buffer_alignment(std::uint64_t size) { return size >= kPageAlignFrom ? kPageAlign : kBufferAlign; }

// Walks the ranges of a segment from front to back.
class Walk {
 public:
  Walk(std::uint64_t start, std::uint64_t total_size) : end_(start), total_size_(total_size) {}

  // Ok when the range is aligned, begins at or after the end of the one before it, and ends inside the segment.
  Status next(std::string_view name, RawRange range, std::uint64_t alignment) {
    if (range.offset % alignment != 0) return wrong(name, "not aligned to " + std::to_string(alignment), range);
    if (range.offset < end_) return wrong(name, "overlaps what is before it or is out of order", range);
    if (range.offset > total_size_ || range.size > total_size_ - range.offset) {
      return wrong(name, "ends after the segment", range);
    }
    end_ = range.offset + range.size;
    return {};
  }

  // A big one may begin up to kBufferAlign - 1 bytes into a page, any other anywhere: see plan_segment().
  Status next_buffer(RawRange range) {
    if (range.offset % buffer_alignment(range.size) >= kBufferAlign) return wrong("buffer", "not page-aligned", range);
    return next("buffer", range, 1);
  }

 private:
  static Status wrong(std::string_view name, std::string_view what, RawRange range) {
    return invalid(std::string(name) + " (offset " + std::to_string(range.offset) + ", size " +
                   std::to_string(range.size) + ") " + std::string(what));
  }

  std::uint64_t end_;
  std::uint64_t total_size_;
};

Status check_header(const Header& header, std::uint64_t segment_size) {
  if (std::memcmp(header.magic, segment_format::kMagic, sizeof header.magic) != 0) return invalid("wrong magic");
  if (header.version != segment_format::kVersion) {
    return invalid("format version " + std::to_string(header.version) + ", this is " +
                   std::to_string(segment_format::kVersion));
  }
  if (header.header_size != sizeof(Header)) return invalid("wrong header size");
  if (header.checksum != segment_format::checksum(header)) return invalid("wrong checksum of the header");
  if (header.reserved != 0) return invalid("reserved field is not 0");
  if (header.total_size > kMaxSegment) return invalid("size overflows");
  if (header.total_size != segment_size) {
    return invalid("says " + std::to_string(header.total_size) + " bytes, has " + std::to_string(segment_size));
  }
  return {};
}

// Places of everything but the buffers. `walk` has passed the header.
Status check_places(const Header& header, Walk& walk) {
  const struct {
    const char* name;
    RawRange range;
    std::uint64_t alignment;
  } places[] = {
      {"loader", header.loader, 1},
      {"target", header.target, 1},
      {"meta", header.meta, segment_format::kHeadAlign},
      {"tensors", header.tensors, segment_format::kHeadAlign},
      {"buffer table", header.buffers, segment_format::kHeadAlign},
      {"skeleton", header.skeleton, segment_format::kHeadAlign},
  };
  for (const auto& place : places) {
    if (Status status = walk.next(place.name, place.range, place.alignment); !status.ok()) return status;
  }
  return {};
}

// `range` is inside the segment; `head` may be shorter.
Result<std::string> read_string(std::string_view name, RawRange range, std::span<const std::byte> head) {
  if (range.size > kMaxString) return invalid(std::string(name) + " is longer than " + std::to_string(kMaxString));
  if (range.offset + range.size > head.size()) return invalid(std::string(name) + " is cut off");
  std::string text(reinterpret_cast<const char*>(head.data() + range.offset), range.size);
  if (!is_utf8(text)) return invalid(std::string(name) + " is not UTF-8");
  return text;
}

Result<std::vector<Range>> read_buffers(RawRange table, std::span<const std::byte> head, Walk& walk) {
  if (table.size % sizeof(RawRange) != 0) return invalid("buffer table is not a whole number of pairs");
  const std::uint64_t count = table.size / sizeof(RawRange);
  if (count > kMaxBuffers) return invalid("more than " + std::to_string(kMaxBuffers) + " buffers");
  if (table.offset + table.size > head.size()) return invalid("buffer table is cut off");
  std::vector<Range> buffers(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    RawRange raw;
    std::memcpy(&raw, head.data() + table.offset + i * sizeof raw, sizeof raw);
    if (Status status = walk.next_buffer(raw); !status.ok()) {
      return Status(status.code(), status.message() + " (number " + std::to_string(i) + ")");
    }
    buffers[i] = {raw.offset, raw.size};
  }
  return buffers;
}

Range to_range(RawRange raw) { return {raw.offset, raw.size}; }

Status check_draft(const Manifest& draft, std::size_t buffer_count) {
  for (const auto& [name, text] : {std::pair("loader", &draft.loader), std::pair("target", &draft.target)}) {
    if (text->size() > kMaxString) {
      return invalid(std::string(name) + " is longer than " + std::to_string(kMaxString) + " bytes");
    }
    if (!is_utf8(*text)) return invalid(std::string(name) + " is not UTF-8");
  }
  if (buffer_count > kMaxBuffers) {
    return invalid(std::to_string(buffer_count) + " buffers, the limit is " + std::to_string(kMaxBuffers));
  }
  return {};
}

// Puts `size` bytes at the next aligned place after `end`, which moves on.
bool place(std::uint64_t& end, std::uint64_t size, std::uint64_t alignment, std::uint64_t& offset) {
  if (!align_up(end, alignment)) return false;
  offset = end;
  return advance(end, size);
}

bool place_buffers(std::uint64_t end, std::span<const std::uint64_t> sizes, std::span<const std::uint64_t> addresses,
                   SegmentPlan& plan) {
  plan.buffers.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    Range range{0, sizes[i]};
    const std::uint64_t more = addresses.empty() || range.size == 0 ? 0 : addresses[i] % kBufferAlign;
    if (!align_up(end, buffer_alignment(range.size)) || !advance(end, more)) return false;
    range.offset = end;
    if (!advance(end, range.size)) return false;
    plan.buffers.push_back(range);
  }
  plan.total_size = end;
  return true;
}

Header make_header(const Manifest& draft) {
  Header header{};
  std::memcpy(header.magic, segment_format::kMagic, sizeof header.magic);
  header.version = segment_format::kVersion;
  header.header_size = sizeof(Header);
  header.id = draft.id;
  header.created_ns = draft.created_ns;
  header.native_ns = draft.native_ns;
  std::memcpy(header.key, draft.key.data(), sizeof header.key);
  return header;
}

}  // namespace

Result<Manifest> parse_manifest(std::span<const std::byte> head, std::uint64_t segment_size) {
  Header header;
  if (head.size() < sizeof header) return invalid("shorter than its header");
  std::memcpy(&header, head.data(), sizeof header);
  if (Status status = check_header(header, segment_size); !status.ok()) return status;
  Walk walk(sizeof header, header.total_size);
  if (Status status = check_places(header, walk); !status.ok()) return status;

  Result<std::string> loader = read_string("loader", header.loader, head);
  if (!loader.ok()) return loader.status();
  Result<std::string> target = read_string("target", header.target, head);
  if (!target.ok()) return target.status();
  Result<std::vector<Range>> buffers = read_buffers(header.buffers, head, walk);
  if (!buffers.ok()) return buffers.status();

  Manifest manifest;
  std::memcpy(manifest.key.data(), header.key, sizeof header.key);
  manifest.id = header.id;
  manifest.total_size = header.total_size;
  manifest.created_ns = header.created_ns;
  manifest.native_ns = header.native_ns;
  manifest.loader = std::move(loader).value();
  manifest.target = std::move(target).value();
  manifest.meta = to_range(header.meta);
  manifest.skeleton = to_range(header.skeleton);
  manifest.tensors = to_range(header.tensors);
  manifest.buffers = std::move(buffers).value();
  return manifest;
}

Result<SegmentPlan> plan_segment(const Manifest& draft, std::span<const std::byte> meta,
                                 std::span<const std::byte> skeleton, std::span<const std::byte> tensors,
                                 std::span<const std::uint64_t> buffer_sizes,
                                 std::span<const std::uint64_t> addresses) {
  if (Status status = check_draft(draft, buffer_sizes.size()); !status.ok()) return status;
  Header header = make_header(draft);
  const std::uint64_t table_size = buffer_sizes.size() * sizeof(RawRange);
  const struct {
    RawRange& range;
    std::uint64_t size;
    std::uint64_t alignment;
  } places[] = {
      {header.loader, draft.loader.size(), 1},
      {header.target, draft.target.size(), 1},
      {header.meta, meta.size(), segment_format::kHeadAlign},
      {header.tensors, tensors.size(), segment_format::kHeadAlign},
      {header.buffers, table_size, segment_format::kHeadAlign},
      {header.skeleton, skeleton.size(), segment_format::kHeadAlign},
  };
  SegmentPlan plan;
  std::uint64_t end = sizeof header;
  bool fits = true;
  for (const auto& [range, size, alignment] : places) {
    range.size = size;
    fits = fits && place(end, size, alignment, range.offset);
  }
  if (!fits || !place_buffers(end, buffer_sizes, addresses, plan)) {
    return Status(Code::kExhausted, "segment: the sizes add up to more than 2^63 bytes");
  }
  header.total_size = plan.total_size;
  header.checksum = segment_format::checksum(header);

  plan.head.resize(end);
  const auto put = [&plan](std::uint64_t offset, const void* data, std::size_t size) {
    if (size != 0) std::memcpy(plan.head.data() + offset, data, size);
  };
  put(0, &header, sizeof header);
  put(header.loader.offset, draft.loader.data(), draft.loader.size());
  put(header.target.offset, draft.target.data(), draft.target.size());
  put(header.meta.offset, meta.data(), meta.size());
  put(header.tensors.offset, tensors.data(), tensors.size());
  static_assert(sizeof(Range) == sizeof(RawRange));
  put(header.buffers.offset, plan.buffers.data(), table_size);
  put(header.skeleton.offset, skeleton.data(), skeleton.size());
  return plan;
}

std::string entry_id_to_string(EntryId id) {
  std::string text(16, '0');
  for (std::size_t i = 16; i-- > 0; id >>= 4) text[i] = "0123456789abcdef"[id & 0xF];
  return text;
}

Result<EntryId> entry_id_from_string(std::string_view text) {
  EntryId id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) {
    return Status(Code::kInvalid, "'" + std::string(text.substr(0, 64)) + "' is not an entry ID (16 hex digits)");
  }
  return id;
}

}  // namespace overmind
