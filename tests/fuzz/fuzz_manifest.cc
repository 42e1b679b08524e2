// SPDX-License-Identifier: MIT
// parse_manifest on bytes from outside. Whatever it accepts must keep every promise of manifest.h, since
// nobody checks again. Without help the fuzzer would never pass magic, size and checksum (a minute of it
// reached no buffer table): the first byte says which of them are put right for it, whether there is more of
// the segment than it is shown, and whether the rest is a segment or changes to a good one.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "core/manifest.h"
#include "core/segment_format.h"

namespace {

using overmind::Manifest;
using overmind::Range;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_promises(const Manifest& manifest, std::uint64_t segment_size) {
  require(manifest.total_size == segment_size);
  require(manifest.loader.size() <= overmind::kMaxString && manifest.target.size() <= overmind::kMaxString);
  require(manifest.buffers.size() <= overmind::kMaxBuffers);
  std::uint64_t end = sizeof(overmind::segment_format::Header);
  const auto follows = [&end, segment_size](Range range) {
    require(range.offset >= end);
    require(range.offset <= segment_size && range.size <= segment_size - range.offset);
    end = range.offset + range.size;
  };
  for (const Range& range : {manifest.meta, manifest.tensors, manifest.skeleton}) {
    follows(range);
    require(range.offset % overmind::segment_format::kHeadAlign == 0);
  }
  for (const Range& buffer : manifest.buffers) {  // as natively, modulo kBufferAlign: a small one may begin anywhere
    follows(buffer);
    require(buffer.size < overmind::kPageAlignFrom || buffer.offset % overmind::kPageAlign < overmind::kBufferAlign);
  }
}

// What was read can be written, and reads the same; each buffer lies as it did, modulo kBufferAlign.
void check_round_trip(const Manifest& manifest) {
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> addresses;
  for (const Range& buffer : manifest.buffers) {
    sizes.push_back(buffer.size);
    addresses.push_back(buffer.offset);
  }
  const overmind::Result<overmind::SegmentPlan> plan = overmind::plan_segment(manifest, {}, {}, {}, sizes, addresses);
  if (!plan.ok()) {
    require(plan.status().code() == overmind::Code::kExhausted);  // alignment pushed it past 2^63
    return;
  }
  const overmind::Result<Manifest> again = overmind::parse_manifest(plan.value().head, plan.value().total_size);
  require(again.ok());
  require(again.value().key == manifest.key && again.value().id == manifest.id);
  require(again.value().loader == manifest.loader && again.value().target == manifest.target);
  require(again.value().buffers.size() == sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Range& now = again.value().buffers[i];
    require(now.size == sizes[i]);
    require(now.size == 0 || now.offset % overmind::kBufferAlign == addresses[i] % overmind::kBufferAlign);
  }
}

// A good segment with some bytes changed: triples of position (two bytes, little-endian) and value.
std::vector<std::uint8_t> changed_segment(const std::uint8_t* edits, std::size_t size) {
  Manifest draft;
  draft.loader = "loader";
  draft.target = "/m\xC3\xBC";
  const std::uint64_t sizes[] = {1, 0, 64, 65, overmind::kPageAlignFrom, 8};
  const overmind::Result<overmind::SegmentPlan> plan = overmind::plan_segment(draft, {}, {}, {}, sizes);
  const auto* begin = reinterpret_cast<const std::uint8_t*>(plan.value().head.data());
  std::vector<std::uint8_t> bytes(begin, begin + plan.value().head.size());
  for (; size >= 3; edits += 3, size -= 3) bytes[(edits[0] + 256u * edits[1]) % bytes.size()] = edits[2];
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const unsigned help = data[0];
  // Exactly as large as what is shown, so that the sanitizer sees a read past it.
  const bool edits = (help & 16) != 0;
  std::vector<std::uint8_t> bytes =
      edits ? changed_segment(data + 1, size - 1) : std::vector<std::uint8_t>(data + 1, data + size);
  std::uint64_t segment_size = bytes.size();
  overmind::segment_format::Header header;
  if (bytes.size() >= sizeof header) {
    std::memcpy(&header, bytes.data(), sizeof header);
    if ((help & 1) != 0) {
      std::memcpy(header.magic, overmind::segment_format::kMagic, sizeof header.magic);
      header.version = overmind::segment_format::kVersion;
      header.header_size = sizeof header;
      header.reserved = 0;
    }
    if ((help & 2) != 0) segment_size = header.total_size;  // the head of a larger segment
    if ((help & 4) != 0) header.total_size = segment_size;
    if ((help & 8) != 0) header.checksum = overmind::segment_format::checksum(header);
    std::memcpy(bytes.data(), &header, sizeof header);
  }
  const overmind::Result<Manifest> result = overmind::parse_manifest(std::as_bytes(std::span(bytes)), segment_size);
  if (!result.ok()) {
    require(result.status().code() == overmind::Code::kInvalid && !result.status().message().empty());
    return 0;
  }
  check_promises(result.value(), segment_size);
  check_round_trip(result.value());
  return 0;
}
