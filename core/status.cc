// SPDX-License-Identifier: MIT
#include "core/status.h"

#include <system_error>

namespace overmind {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kNotFound:
      return "not found";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kExhausted:
      return "exhausted";
    case Code::kDenied:
      return "denied";
    case Code::kInvalid:
      return "invalid";
    case Code::kTimeout:
      return "timeout";
    case Code::kVersion:
      return "version";
    case Code::kIo:
      return "io";
  }
  return "unknown";  // a value from outside that was cast
}

std::string Status::to_string() const {
  std::string text(code_name(code_));
  if (!message_.empty()) text.append(": ").append(message_);
  return text;
}

namespace {

Code code_of(int error) {
  switch (error) {
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case EFBIG:
    case EAGAIN:  // clone, mlock: a resource limit. Non-blocking calls handle it before they come here
    case ENOBUFS:
      return Code::kExhausted;
    case EACCES:
    case EPERM:
    case ELOOP:
      return Code::kDenied;
    case ENOSYS:
    case ECONNREFUSED:
      return Code::kUnavailable;
    case ETIMEDOUT:
      return Code::kTimeout;
    default:
      return Code::kIo;
  }
}

}  // namespace

Status errno_status(std::string_view context, int error) {
  // std::system_category is thread-safe where strerror is not.
  return Status(code_of(error), std::string(context) + ": " + std::system_category().message(error));
}

}  // namespace overmind
