// SPDX-License-Identifier: MIT
#include "core/protocol.h"

#include <cmath>
#include <concepts>
#include <limits>
#include <nlohmann/json.hpp>

namespace overmind::protocol {
namespace {

using Json = nlohmann::json;

// The first pass, before anything is built from the bytes: one item, definite lengths only, no tags,
// bounded nesting and counts. The library's parser recurses with nested containers and with strings
// cut into chunks, and throws for absurd announced lengths; none of that gets past here.
class ShapeCheck {
 public:
  explicit ShapeCheck(std::span<const std::byte> bytes) : rest_(bytes) {}
  bool is_one_item() { return item(0) && rest_.empty(); }

 private:
  static constexpr int kMaxDepth = 3;  // entries reply: map, array, map

  bool item(int depth) {
    if (rest_.empty() || depth > kMaxDepth) return false;
    auto initial = static_cast<unsigned>(rest_[0]);
    rest_ = rest_.subspan(1);
    std::uint64_t argument = initial & 31;
    if (argument >= 24 && !extended(argument)) return false;
    switch (initial >> 5) {
      case 0:  // numbers
      case 1:
      case 7:
        return true;
      case 2:  // bytes, text
      case 3:
        if (argument > rest_.size()) return false;
        rest_ = rest_.subspan(argument);
        return true;
      case 4:
        return items(argument, depth + 1);
      case 5:
        return argument <= kMaxIds && items(argument * 2, depth + 1);
      default:  // tags
        return false;
    }
  }
  bool items(std::uint64_t count, int depth) {
    if (count > 2 * kMaxIds) return false;
    for (; count > 0; --count) {
      if (!item(depth)) return false;
    }
    return true;
  }
  // 24 to 27 announce 1, 2, 4 or 8 more bytes, big-endian; 31 would be an indefinite length.
  bool extended(std::uint64_t& argument) {
    if (argument > 27) return false;
    std::size_t size = std::size_t{1} << (argument - 24);
    if (size > rest_.size()) return false;
    argument = 0;
    for (std::byte byte : rest_.first(size)) argument = argument << 8 | static_cast<std::uint64_t>(byte);
    rest_ = rest_.subspan(size);
    return true;
  }

  std::span<const std::byte> rest_;
};

struct Encoder {
  Json& map;
  template <typename T>
  void operator()(const char* name, T& value) {
    map[name] = to_json(value);
  }
  static Json to_json(Key& key) { return Json::binary(std::vector<std::uint8_t>(key.begin(), key.end())); }
  static Json to_json(EntryInfo& entry) {
    Json json = Json::object();
    entry.fields(Encoder{json});
    return json;
  }
  template <typename T>
  static Json to_json(std::vector<T>& values) {
    Json json = Json::array();
    for (T& value : values) json.push_back(to_json(value));
    return json;
  }
  template <typename T>
  static Json to_json(T& value) {
    return Json(value);
  }
};

struct Decoder {
  const Json& map;
  std::string& error;
  std::size_t fields = 0;

  template <typename T>
  void operator()(const char* name, T& value) {
    ++fields;
    if (!error.empty()) return;
    auto found = map.find(name);
    if (found == map.end()) {
      error = std::string("field missing: ") + name;
    } else if (!from_json(*found, value)) {
      error = std::string("field of the wrong form: ") + name;
    }
  }
  static bool from_json(const Json& json, bool& value) {
    if (!json.is_boolean()) return false;
    value = json.get<bool>();
    return true;
  }
  template <std::unsigned_integral T>
  static bool from_json(const Json& json, T& value) {
    if (!json.is_number_unsigned()) return false;
    auto number = json.get<std::uint64_t>();
    if (number > std::numeric_limits<T>::max()) return false;
    value = static_cast<T>(number);
    return true;
  }
  static bool from_json(const Json& json, double& value) {
    if (!json.is_number_float()) return false;
    value = json.get<double>();
    return std::isfinite(value);
  }
  static bool from_json(const Json& json, std::string& value) {
    const auto* text = json.get_ptr<const std::string*>();
    if (text == nullptr || text->size() > kMaxString) return false;
    value = *text;
    return true;
  }
  static bool from_json(const Json& json, Key& value) {
    if (!json.is_binary() || json.get_binary().size() != value.size()) return false;
    std::copy(json.get_binary().begin(), json.get_binary().end(), value.begin());
    return true;
  }
  static bool from_json(const Json& json, EntryInfo& value) {
    if (!json.is_object()) return false;
    std::string error;
    Decoder decoder{json, error};
    value.fields(decoder);
    return error.empty() && decoder.fields == json.size();
  }
  template <typename T>
  static bool from_json(const Json& json, std::vector<T>& values) {
    if (!json.is_array() || json.size() > kMaxIds) return false;
    for (const Json& item : json) {
      if (!from_json(item, values.emplace_back())) return false;
    }
    return true;
  }
};

template <typename Variant>
std::vector<std::byte> encode_variant(Variant message) {
  Json map = Json::object();
  std::visit(
      [&map](auto& alternative) {
        map["op"] = alternative.kOp;
        alternative.fields(Encoder{map});
      },
      message);
  std::vector<std::uint8_t> bytes = Json::to_cbor(map);
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  return {begin, begin + bytes.size()};
}

// Tries the alternatives of `Variant` in turn until one has this op.
template <typename Variant, std::size_t I = 0>
Result<Variant> decode_op(const std::string& op, const Json& map) {
  if constexpr (I == std::variant_size_v<Variant>) {
    return Status(Code::kInvalid, "message with an unknown op");
  } else {
    using Message = std::variant_alternative_t<I, Variant>;
    if (op != Message::kOp) return decode_op<Variant, I + 1>(op, map);
    Message message;
    std::string error;
    Decoder decoder{map, error};
    message.fields(decoder);
    if (error.empty() && decoder.fields + 1 != map.size()) error = "fields that it does not have";
    if (!error.empty()) return Status(Code::kInvalid, "message '" + op + "': " + error);
    return Variant(std::move(message));
  }
}

template <typename Variant>
Result<Variant> decode_variant(std::span<const std::byte> frame) {
  if (frame.size() > kMaxFrame) return Status(Code::kInvalid, "message longer than 64 KiB");
  if (!ShapeCheck(frame).is_one_item()) return Status(Code::kInvalid, "message is not CBOR of the expected shape");
  const auto* begin = reinterpret_cast<const std::uint8_t*>(frame.data());
  const auto* end = begin + frame.size();
  Json map = Json::from_cbor(begin, end, /*strict=*/true, /*allow_exceptions=*/false);
  if (!map.is_object()) return Status(Code::kInvalid, "message is not a CBOR map");
  auto op = map.find("op");
  if (op == map.end() || !op->is_string()) return Status(Code::kInvalid, "message without an op");
  return decode_op<Variant>(op->get_ref<const std::string&>(), map);
}

}  // namespace

std::vector<std::byte> encode(const Request& request) { return encode_variant(request); }
std::vector<std::byte> encode(const Reply& reply) { return encode_variant(reply); }
Result<Request> decode_request(std::span<const std::byte> frame) { return decode_variant<Request>(frame); }
Result<Reply> decode_reply(std::span<const std::byte> frame) { return decode_variant<Reply>(frame); }

std::size_t encoded_bound(const EntryInfo& entry) { return 320 + entry.loader.size() + entry.target.size(); }

Failure failure_of(const Status& status) { return {std::string(code_name(status.code())), status.message()}; }

Status status_of(const Failure& failure) {
  for (Code code : {Code::kNotFound, Code::kUnavailable, Code::kExhausted, Code::kDenied, Code::kInvalid,
                    Code::kTimeout, Code::kVersion, Code::kIo}) {
    if (failure.code == code_name(code)) return {code, failure.message};
  }
  return {Code::kIo, failure.message};
}

}  // namespace overmind::protocol
