// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/wire.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace overmind::kernel {
namespace {

constexpr std::string_view kProtocolVersion = "5.3";
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

std::string hex(const unsigned char* bytes, std::size_t size) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * size);
  for (std::size_t i = 0; i < size; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

std::string random_id() {
  std::array<unsigned char, 16> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw std::system_error(errno, std::generic_category(), "getrandom");
  return hex(bytes.data(), bytes.size());
}

std::string now_iso8601() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  const std::time_t seconds = micros / 1000000;
  std::tm parts;
  gmtime_r(&seconds, &parts);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &parts);
  char text[48];
  std::snprintf(text, sizeof text, "%s.%06dZ", date, static_cast<int>(micros % 1000000));
  return text;
}

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Bytes that a character with this first byte has; 0: no character begins so.
std::size_t length_of(unsigned char first) {
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return 2;
  if (first >= 0xE0 && first <= 0xEF) return 3;
  if (first >= 0xF0 && first <= 0xF4) return 4;
  return 0;
}

// Overlong forms, surrogates and what lies beyond U+10FFFF show in the second byte.
bool second_fits(unsigned char first, unsigned char second) {
  switch (first) {
    case 0xE0:
      return second >= 0xA0;
    case 0xED:
      return second < 0xA0;
    case 0xF0:
      return second >= 0x90;
    case 0xF4:
      return second < 0x90;
    default:
      return true;
  }
}

}  // namespace

void append_json_string(std::string& out, std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  out.reserve(out.size() + text.size() + text.size() / 32 + 2);
  out += '"';
  std::size_t done = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
    out.append(text, done, i - done);
    done = i + 1;
    out += '\\';
    switch (byte) {
      case '"':
      case '\\':
        out += static_cast<char>(byte);
        break;
      case '\n':
        out += 'n';
        break;
      case '\r':
        out += 'r';
        break;
      case '\t':
        out += 't';
        break;
      default:
        out += "u00";
        out += kDigits[byte >> 4];
        out += kDigits[byte & 15];
    }
  }
  out.append(text, done);
  out += '"';
}

std::string take_utf8(std::string& bytes) {
  std::string text;
  text.reserve(bytes.size());
  std::size_t i = 0;
  while (i < bytes.size()) {
    const auto first = static_cast<unsigned char>(bytes[i]);
    const std::size_t length = length_of(first);
    std::size_t have = length == 0 ? 0 : 1;
    while (have > 0 && have < length && i + have < bytes.size() && is_continuation(bytes[i + have]) &&
           (have > 1 || second_fits(first, static_cast<unsigned char>(bytes[i + 1]))))
      ++have;
    if (have > 0 && have == length) {
      text.append(bytes, i, length);
      i += length;
    } else if (have > 0 && i + have == bytes.size()) {
      break;  // cut off by the end of what was read
    } else {
      text += kReplacement;
      i += have > 0 ? have : 1;
    }
  }
  bytes.erase(0, i);
  return text;
}

struct Signer::Mac {
  EVP_MAC* algorithm = nullptr;
  EVP_MAC_CTX* keyed = nullptr;

  ~Mac() {
    EVP_MAC_CTX_free(keyed);
    EVP_MAC_free(algorithm);
  }
};

Signer::Signer(const std::string& scheme, std::string key) {
  if (key.empty()) return;
  if (!scheme.starts_with("hmac-")) throw std::invalid_argument("unknown signature scheme " + scheme);
  std::string digest = scheme.substr(5);
  mac_ = std::make_unique<Mac>();
  mac_->algorithm = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  mac_->keyed = EVP_MAC_CTX_new(mac_->algorithm);
  const std::array<OSSL_PARAM, 2> params = {OSSL_PARAM_construct_utf8_string("digest", digest.data(), 0),
                                            OSSL_PARAM_construct_end()};
  const auto* bytes = reinterpret_cast<const unsigned char*>(key.data());
  if (mac_->keyed == nullptr || EVP_MAC_init(mac_->keyed, bytes, key.size(), params.data()) != 1)
    throw std::invalid_argument("unknown signature scheme " + scheme);
}

Signer::~Signer() = default;

std::string Signer::sign(std::initializer_list<std::string_view> parts) const {
  if (!mac_) return {};
  EVP_MAC_CTX* context = EVP_MAC_CTX_dup(mac_->keyed);
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  std::size_t size = 0;
  bool good = context != nullptr;
  for (const std::string_view part : parts)
    good = good && EVP_MAC_update(context, reinterpret_cast<const unsigned char*>(part.data()), part.size()) == 1;
  good = good && EVP_MAC_final(context, digest.data(), &size, digest.size()) == 1;
  EVP_MAC_CTX_free(context);
  if (!good) throw std::runtime_error("a message could not be signed");
  return hex(digest.data(), size);
}

bool Signer::verify(std::string_view signature, std::initializer_list<std::string_view> parts) const {
  if (!mac_) return true;
  const std::string right = sign(parts);
  return right.size() == signature.size() && CRYPTO_memcmp(right.data(), signature.data(), right.size()) == 0;
}

Session::Session(std::string username) : id_(random_id()), username_(std::move(username)) {}

std::string Session::header(std::string_view msg_type) {
  std::string text = "{\"msg_id\":\"";
  text += id_;
  text += '_';
  text += std::to_string(getpid());
  text += '_';
  text += std::to_string(count_.fetch_add(1, std::memory_order_relaxed));
  text += "\",\"msg_type\":";
  append_json_string(text, msg_type);
  text += ",\"username\":";
  append_json_string(text, username_);
  text += ",\"session\":\"";
  text += id_;
  text += "\",\"date\":\"";
  text += now_iso8601();
  text += "\",\"version\":\"";
  text += kProtocolVersion;
  text += "\"}";
  return text;
}

}  // namespace overmind::kernel
