// SPDX-License-Identifier: MIT
#include "core/protocol.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

namespace overmind::protocol {
namespace {

using Json = nlohmann::json;

std::vector<std::byte> cbor(const Json& json) {
  std::vector<std::uint8_t> bytes = Json::to_cbor(json);
  std::vector<std::byte> frame(bytes.size());
  std::memcpy(frame.data(), bytes.data(), bytes.size());
  return frame;
}

std::string refusal(const Json& json) {
  Result<Request> request = decode_request(cbor(json));
  if (request.ok()) return "accepted";
  EXPECT_EQ(request.status().code(), Code::kInvalid);
  return request.status().message();
}

Result<Request> decode_bytes(std::initializer_list<int> bytes) {
  std::vector<std::byte> frame;
  for (int byte : bytes) frame.push_back(static_cast<std::byte>(byte));
  return decode_request(frame);
}

// Encoding what was decoded gives the same bytes, so every field went both ways.
template <typename T>
T round_trip_request(const T& message) {
  std::vector<std::byte> frame = encode(Request(message));
  Result<Request> decoded = decode_request(frame);
  EXPECT_TRUE(decoded.ok()) << T::kOp << ": " << decoded.status().to_string();
  if (!decoded.ok()) return T{};
  EXPECT_EQ(encode(decoded.value()), frame) << T::kOp;
  return std::get<T>(decoded.value());
}

template <typename T>
T round_trip_reply(const T& message) {
  std::vector<std::byte> frame = encode(Reply(message));
  Result<Reply> decoded = decode_reply(frame);
  EXPECT_TRUE(decoded.ok()) << T::kOp << ": " << decoded.status().to_string();
  if (!decoded.ok()) return T{};
  EXPECT_EQ(encode(decoded.value()), frame) << T::kOp;
  return std::get<T>(decoded.value());
}

constexpr std::uint64_t kBig = std::numeric_limits<std::uint64_t>::max();

TEST(ProtocolTest, EveryRequestGoesBothWays) {
  Key key{};
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::uint8_t>(255 - i);
  Hello hello = round_trip_request(Hello{1, kBig, true, {1, 2, kBig}});
  EXPECT_EQ(hello.client, kBig);
  EXPECT_EQ(hello.mapped, (std::vector<EntryId>{1, 2, kBig}));
  LookupRequest lookup = round_trip_request(LookupRequest{key, true, 1500});
  EXPECT_EQ(lookup.key, key);
  EXPECT_EQ(lookup.wait_ms, 1500u);
  EXPECT_EQ(round_trip_request(Abandon{kBig}).token, kBig);
  Publish publish = round_trip_request(Publish{1, 2, 3, 4, "loader", std::string(kMaxString, 'p')});
  EXPECT_EQ(publish.native_ns, 4u);
  EXPECT_EQ(publish.target.size(), kMaxString);
  round_trip_request(Commit{});
  EXPECT_EQ(round_trip_request(Used{9}).id, 9u);
  EXPECT_EQ(round_trip_request(Unmapped{{7, 8}}).ids.size(), 2u);
  EXPECT_EQ(round_trip_request(ListRequest{9}).after, 9u);
  round_trip_request(StatsRequest{});
  EXPECT_EQ(round_trip_request(OpenRequest{9}).id, 9u);
  EXPECT_EQ(round_trip_request(Drop{9}).id, 9u);
  round_trip_request(DropAll{});
  EXPECT_TRUE(round_trip_request(Pin{9, true}).on);
  round_trip_request(Stop{});
}

TEST(ProtocolTest, EveryReplyGoesBothWays) {
  EXPECT_EQ(round_trip_reply(HelloReply{1, "0.1.0"}).package, "0.1.0");
  EXPECT_EQ(round_trip_reply(Hit{5}).id, 5u);
  EXPECT_EQ(round_trip_reply(LeaseGranted{6}).token, 6u);
  Busy busy = round_trip_reply(Busy{true, 1.25, 0, 3, 4, 5e9});
  EXPECT_DOUBLE_EQ(busy.elapsed_seconds, 1.25);
  EXPECT_DOUBLE_EQ(busy.bytes_per_second, 5e9);
  round_trip_reply(Absent{});
  round_trip_reply(Ok{});
  EntryInfo entry;
  entry.id = 1;
  entry.loader = "l";
  entry.created = 1.7e9 + 0.123456;
  entry.pinned = true;
  Entries entries = round_trip_reply(Entries{{entry, entry}, true});
  ASSERT_EQ(entries.entries.size(), 2u);
  EXPECT_DOUBLE_EQ(entries.entries[1].created, entry.created);
  EXPECT_TRUE(entries.more);
  StoreStats stats;
  stats.budget = kBig;
  stats.version = "v";
  EXPECT_EQ(round_trip_reply(stats).budget, kBig);
  EXPECT_EQ(round_trip_reply(Dropped{3}).count, 3u);
}

TEST(ProtocolTest, AFailureKeepsItsCode) {
  for (Code code : {Code::kNotFound, Code::kUnavailable, Code::kExhausted, Code::kDenied, Code::kInvalid,
                    Code::kTimeout, Code::kVersion, Code::kIo}) {
    Status back = status_of(round_trip_reply(failure_of({code, "why"})));
    EXPECT_EQ(back.code(), code);
    EXPECT_EQ(back.message(), "why");
  }
  EXPECT_EQ(status_of({"a word of tomorrow", "why"}).code(), Code::kIo);
}

TEST(ProtocolTest, TheLargestEntryFitsIntoAFrame) {
  EntryInfo entry;
  entry.id = entry.nbytes = entry.hits = kBig;
  entry.mapped_by = std::numeric_limits<std::uint32_t>::max();
  entry.created = entry.last_used = entry.native_seconds = 1e9 / 3;
  entry.loader = entry.target = std::string(kMaxString, 'x');
  std::size_t empty = encode(Reply(Entries{})).size();
  EXPECT_LE(encode(Reply(Entries{{entry}, true})).size() - empty, encoded_bound(entry));
  EXPECT_LT(encoded_bound(entry), kMaxFrame);
  std::vector<EntryId> ids(kMaxIds, kBig);
  EXPECT_LE(encode(Request(Hello{1, kBig, true, ids})).size(), kMaxFrame);
}

TEST(ProtocolTest, AWrongMapIsRefused) {
  Json abandon = {{"op", "abandon"}, {"token", 5}};
  EXPECT_EQ(refusal(abandon), "accepted");
  EXPECT_EQ(refusal({{"op", "launch"}}), "message with an unknown op");
  EXPECT_EQ(refusal({{"token", 5}}), "message without an op");
  EXPECT_EQ(refusal({{"op", 5}}), "message without an op");
  EXPECT_EQ(refusal({{"op", "abandon"}}), "message 'abandon': field missing: token");
  EXPECT_EQ(refusal({{"op", "abandon"}, {"token", 5}, {"more", 1}}), "message 'abandon': fields that it does not have");
  EXPECT_EQ(refusal(Json::array({1, 2})), "message is not a CBOR map");
  EXPECT_EQ(refusal("abandon"), "message is not a CBOR map");
}

TEST(ProtocolTest, AWrongValueIsRefused) {
  for (const Json& wrong : {Json("5"), Json(-1), Json(5.0), Json(true), Json(nullptr), Json::array({5})}) {
    EXPECT_EQ(refusal({{"op", "abandon"}, {"token", wrong}}), "message 'abandon': field of the wrong form: token")
        << wrong;
  }
  auto lookup = [](const Json& key, const Json& wait) {
    return refusal({{"op", "lookup"}, {"key", key}, {"lease", true}, {"wait_ms", wait}});
  };
  Json key = Json::binary(std::vector<std::uint8_t>(32));
  EXPECT_EQ(lookup(key, 1), "accepted");
  EXPECT_EQ(lookup(Json::binary(std::vector<std::uint8_t>(31)), 1), "message 'lookup': field of the wrong form: key");
  EXPECT_EQ(lookup(Json::binary(std::vector<std::uint8_t>(33)), 1), "message 'lookup': field of the wrong form: key");
  EXPECT_EQ(lookup(std::string(32, 'k'), 1), "message 'lookup': field of the wrong form: key");
  EXPECT_EQ(lookup(key, std::uint64_t{1} << 32), "message 'lookup': field of the wrong form: wait_ms");
  Json ids = std::vector<std::uint64_t>(kMaxIds + 1, 1);
  EXPECT_EQ(refusal({{"op", "unmapped"}, {"ids", ids}}), "message 'unmapped': field of the wrong form: ids");
  Json drop = {{"op", "drop"}, {"id", Json::object()}};
  EXPECT_EQ(refusal(drop), "message 'drop': field of the wrong form: id");
  std::vector<std::byte> failure = cbor({{"op", "failure"}, {"code", "io"}, {"message", std::string(4097, 'm')}});
  EXPECT_EQ(decode_reply(failure).status().code(), Code::kInvalid);
}

TEST(ProtocolTest, NumbersThatAreNoneAreRefused) {
  Busy busy;
  busy.elapsed_seconds = std::numeric_limits<double>::infinity();
  EXPECT_EQ(decode_reply(encode(Reply(busy))).status().code(), Code::kInvalid);
  busy.elapsed_seconds = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(decode_reply(encode(Reply(busy))).status().code(), Code::kInvalid);
}

TEST(ProtocolTest, EveryPrefixIsRefused) {
  std::vector<std::byte> frame = encode(Request(Publish{1, 2, 3, 4, "loader", "target"}));
  for (std::size_t size = 0; size < frame.size(); ++size) {
    EXPECT_EQ(decode_request(std::span(frame).first(size)).status().code(), Code::kInvalid) << size;
  }
  frame.push_back(std::byte{0});
  EXPECT_EQ(decode_request(frame).status().code(), Code::kInvalid);
}

TEST(ProtocolTest, BytesThatWouldHurtAParserAreRefused) {
  for (int opener : {0x81, 0x9f, 0xa1, 0xbf, 0x5f, 0x7f, 0xc1}) {  // nested arrays, maps, chunked strings, tags
    std::vector<std::byte> deep(kMaxFrame, static_cast<std::byte>(opener));
    EXPECT_EQ(decode_request(deep).status().code(), Code::kInvalid) << opener;
  }
  for (int opener : {0x5b, 0x7b, 0x9b, 0xbb}) {  // lengths of 2^64 - 1
    EXPECT_FALSE(decode_bytes({opener, 255, 255, 255, 255, 255, 255, 255, 255}).ok()) << opener;
    EXPECT_FALSE(decode_bytes({opener, 0x7f, 255, 255, 255, 255, 255, 255, 255}).ok()) << opener;
  }
  EXPECT_FALSE(decode_bytes({}).ok());
  EXPECT_FALSE(decode_bytes({0xff}).ok());
  EXPECT_FALSE(decode_bytes({0xa1, 0x01, 0x02}).ok());  // a key that is a number
  EXPECT_FALSE(decode_request(std::vector<std::byte>(kMaxFrame + 1)).ok());
}

}  // namespace
}  // namespace overmind::protocol
