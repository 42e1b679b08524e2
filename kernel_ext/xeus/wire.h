// SPDX-License-Identifier: MIT
// Jupyter messages as bytes: what comes in, what goes out, headers and signatures. No sockets, no Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace overmind::kernel {

// Everything but identities and buffers is JSON text, never parsed here: so that Python sees exactly what the client
// sent, and the client sees a dictionary's keys in the order in which the user's code put them.
struct Message {
  std::vector<std::string> identities;  // how a ROUTER socket finds the client; empty on iopub
  std::string header = "{}";
  std::string parent_header = "{}";
  std::string metadata = "{}";
  std::string content = "{}";
  std::vector<std::string> buffers;
};

using MessagePtr = std::shared_ptr<const Message>;

// Appends `text` (UTF-8; other bytes pass unchanged) to `out` as a JSON string, quotes included.
void append_json_string(std::string& out, std::string_view text);

// The longest beginning of `bytes` that is whole UTF-8, invalid bytes replaced by U+FFFD. What is left in `bytes`
// afterwards is the beginning of a character (3 bytes at most) that the next read may complete.
std::string take_utf8(std::string& bytes);

// HMAC of messages. Thread-safe.
class Signer {
 public:
  // `scheme` is "hmac-" and a digest that OpenSSL knows. An empty key: messages are not signed, and any is accepted.
  // Throws std::invalid_argument for a scheme that can't be had.
  Signer(const std::string& scheme, std::string key);
  ~Signer();
  Signer(const Signer&) = delete;
  Signer& operator=(const Signer&) = delete;

  std::string sign(std::initializer_list<std::string_view> parts) const;  // hex; "" without a key
  bool verify(std::string_view signature, std::initializer_list<std::string_view> parts) const;

 private:
  struct Mac;
  std::unique_ptr<Mac> mac_;  // null: no key
};

// Makes headers. Thread-safe.
class Session {
 public:
  explicit Session(std::string username);

  const std::string& id() const { return id_; }
  std::string header(std::string_view msg_type);

 private:
  std::string id_;
  std::string username_;
  std::atomic<std::uint64_t> count_ = 0;
};

}  // namespace overmind::kernel
