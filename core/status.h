// SPDX-License-Identifier: MIT
// Outcome of an operation that can fail for reasons outside the program.
//
// `core` throws nothing of its own. Status is a value: copyable, cheap when ok.
// Thread safety: const members may be used from any thread; nothing is shared.
#pragma once

#include <cassert>
#include <cerrno>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace overmind {

// One code per thing that a caller does differently. `status.cc` names them; kernel_ext/errors.cc
// turns each into one Python exception.
enum class Code : unsigned char {
  kOk,
  kNotFound,     // no such entry; not a failure of the store
  kUnavailable,  // no daemon can be reached or started
  kExhausted,    // memory, budget, descriptors or a resource limit
  kDenied,       // wrong owner, wrong mode, symlink, wrong peer
  kInvalid,      // malformed bytes from outside: a frame or a segment
  kTimeout,      // a deadline passed
  kVersion,      // the other side speaks another protocol
  kIo,           // any other failed system call
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  // What happened, to what. Empty when ok.
  const std::string& message() const { return message_; }
  // "exhausted: memfd_create: Too many open files"
  std::string to_string() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// "exhausted", "denied", ... the word used in messages, logs and the protocol.
std::string_view code_name(Code code);

// The only place where errno becomes a Status. `context` names the call and the thing.
Status errno_status(std::string_view context, int error = errno);

// A value or the Status that explains its absence. REQUIRES: a Result built from a Status is not ok().
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}        // NOLINT: implicit by intent
  Result(Status status) : state_(std::move(status)) {  // NOLINT: implicit by intent
    assert(!std::get<Status>(state_).ok());
  }

  bool ok() const { return std::holds_alternative<T>(state_); }
  // REQUIRES: ok()
  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }
  // ok() gives an ok Status.
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace overmind
