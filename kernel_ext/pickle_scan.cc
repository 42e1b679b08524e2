// SPDX-License-Identifier: MIT
// Only strings matter, so the stack is not modelled: the pickler pushes the module and the name right before
// STACK_GLOBAL, each either as a new string or from the memo. The memo is numbered by MEMOIZE, so it is enough
// to count those and to remember which ones were strings.
#include "kernel_ext/pickle_scan.h"

#include <cstdint>
#include <cstring>
#include <string_view>
#include <unordered_map>

namespace overmind {
namespace {

class Scanner {
 public:
  explicit Scanner(std::span<const std::byte> pickle)
      : at_(reinterpret_cast<const char*>(pickle.data())), end_(at_ + pickle.size()) {}

  // Whether some object was part of its own constructor arguments. The pickler notices when it has written the call:
  // it pops the result and takes the object that it wrote on the way, which was built from arguments that were not
  // complete yet. A tensor loses its attributes so.
  bool incomplete() const { return incomplete_; }

  // False: can't be followed.
  bool run(std::set<std::pair<std::string, std::string>>& globals) {
    while (at_ < end_) {
      const auto op = static_cast<unsigned char>(*at_++);
      if (op == '.') return true;
      if (op == '0' && (previous_op_ == 'R' || previous_op_ == 0x81 || previous_op_ == 0x92)) incomplete_ = true;
      if (op != 0x95) previous_op_ = op;  // a new frame may begin anywhere
      if (op == 0x93) {
        if (previous_.data() == nullptr || last_.data() == nullptr) return false;
        globals.emplace(previous_, last_);
        pushed(std::string_view());
      } else if (!step(op)) {
        return false;
      }
    }
    return false;
  }

 private:
  bool step(unsigned char op) {
    switch (op) {
      case 0x94:
        return memoize();
      case 'h':
        return recall(1);
      case 'j':
        return recall(4);
      case 0x8c:
        return text(1);
      case 'X':
        return text(4);
      case 0x8d:
        return text(8);
      case 'C':
      case 0x8a:
        return data(1);  // SHORT_BINBYTES, LONG1
      case 'B':
      case 0x8b:
        return data(4);  // BINBYTES, LONG4
      case 0x8e:
      case 0x96:
        return data(8);  // BINBYTES8, BYTEARRAY8
      case 0x80:
        return skip(1);  // PROTO
      case 0x95:
        return skip(8);  // FRAME
      case 'K':
        return value(1);  // BININT1
      case 'M':
        return value(2);  // BININT2
      case 'J':
        return value(4);  // BININT
      case 'G':
        return value(8);  // BINFLOAT
      default:
        return plain(op);
    }
  }

  bool plain(unsigned char op) {
    // GLOBAL, INST, EXT1-4, PUT, GET and the text protocol are never written by protocol 4 and 5 picklers
    // (EXT: by whoever filled copyreg's extension registry).
    switch (op) {
      case '(':
      case ')':
      case '0':
      case '1':
      case '2':
      case 'N':
      case 'Q':
      case 'R':
      case '}':
      case 'e':
      case 'b':
      case 'a':
      case ']':
      case 'u':
      case 's':
      case 't':
      case 'l':
      case 'd':
      case 0x81:
      case 0x85:
      case 0x86:
      case 0x87:
      case 0x88:
      case 0x89:
      case 0x8f:
      case 0x90:
      case 0x91:
      case 0x92:
      case 0x97:
      case 0x98:
        pushed(std::string_view());
        return true;
      default:
        return false;
    }
  }

  // Most opcodes push something that is no string, or combine what is there: either way the two strings
  // of a STACK_GLOBAL come after.
  void pushed(std::string_view string) {
    previous_ = last_;
    last_ = string;
  }

  bool memoize() {
    if (last_.data() != nullptr) strings_.emplace(memo_size_, last_);
    ++memo_size_;
    return true;
  }

  bool recall(std::size_t width) {
    std::uint64_t index = 0;
    if (!number(width, index)) return false;
    const auto found = strings_.find(index);
    pushed(found == strings_.end() ? std::string_view() : found->second);
    return true;
  }

  bool text(std::size_t width) {
    std::uint64_t length = 0;
    if (!number(width, length) || length > left()) return false;
    pushed(std::string_view(at_, length));
    at_ += length;
    return true;
  }

  bool data(std::size_t width) {
    std::uint64_t length = 0;
    return number(width, length) && value(length);
  }

  bool value(std::uint64_t length) {
    pushed(std::string_view());
    return skip(length);
  }

  bool skip(std::uint64_t length) {
    if (length > left()) return false;
    at_ += length;
    return true;
  }

  bool number(std::size_t width, std::uint64_t& result) {
    if (width > left()) return false;
    result = 0;
    std::memcpy(&result, at_, width);
    at_ += width;
    return true;
  }

  std::uint64_t left() const { return static_cast<std::uint64_t>(end_ - at_); }

  const char* at_;
  const char* end_;
  unsigned char previous_op_ = 0;
  bool incomplete_ = false;
  std::string_view previous_, last_;  // the two newest pushes; no data when not a string
  std::unordered_map<std::uint64_t, std::string_view> strings_;
  std::uint64_t memo_size_ = 0;
};

}  // namespace

Result<std::set<std::pair<std::string, std::string>>> pickle_globals(std::span<const std::byte> pickle) {
  std::set<std::pair<std::string, std::string>> globals;
  Scanner scanner(pickle);
  if (!scanner.run(globals)) return Status(Code::kInvalid, "a pickle with opcodes that Overmind can't follow");
  if (scanner.incomplete())
    return Status(Code::kInvalid, "an object that is part of its own constructor arguments, which unpickling loses");
  return globals;
}

}  // namespace overmind
