// SPDX-License-Identifier: MIT
#include "core/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>

namespace overmind {
namespace {

TEST(Status, IsOkAndEmptyByDefault) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.to_string(), "ok");
}

TEST(Status, SaysItsCodeAndMessage) {
  const Status status(Code::kDenied, "/tmp/x: not yours");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.to_string(), "denied: /tmp/x: not yours");
}

TEST(Status, EveryCodeHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(Code::kIo); ++code) names.insert(code_name(static_cast<Code>(code)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(Code::kIo) + 1);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_EQ(code_name(static_cast<Code>(200)), "unknown");
}

TEST(ErrnoStatus, GivesTheCodeThatCallersActOn) {
  for (const int error : {ENOMEM, ENOSPC, EMFILE, ENFILE, EFBIG, EAGAIN}) {
    EXPECT_EQ(errno_status("x", error).code(), Code::kExhausted) << error;
  }
  for (const int error : {EACCES, EPERM, ELOOP}) EXPECT_EQ(errno_status("x", error).code(), Code::kDenied) << error;
  EXPECT_EQ(errno_status("x", ENOSYS).code(), Code::kUnavailable);
  EXPECT_EQ(errno_status("x", ECONNREFUSED).code(), Code::kUnavailable);
  EXPECT_EQ(errno_status("x", ETIMEDOUT).code(), Code::kTimeout);
  EXPECT_EQ(errno_status("x", EBADF).code(), Code::kIo);
}

TEST(ErrnoStatus, NamesTheCallAndTheReason) {
  EXPECT_EQ(errno_status("memfd_create", EMFILE).to_string(), "exhausted: memfd_create: Too many open files");
}

TEST(ErrnoStatus, TakesErrnoWhenNotTold) {
  errno = ENOMEM;
  EXPECT_EQ(errno_status("mmap").code(), Code::kExhausted);
}

TEST(Result, HoldsAValueOrAStatus) {
  const Result<int> good(7);
  EXPECT_TRUE(good.ok());
  EXPECT_EQ(good.value(), 7);
  EXPECT_TRUE(good.status().ok());
  const Result<int> bad(Status(Code::kTimeout, "late"));
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().code(), Code::kTimeout);
}

TEST(Result, MovesAValueOut) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(3));
  const std::unique_ptr<int> value = std::move(result).value();
  EXPECT_EQ(*value, 3);
}

}  // namespace
}  // namespace overmind
