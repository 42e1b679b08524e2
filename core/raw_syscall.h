// SPDX-License-Identifier: MIT
// System calls that touch nothing but registers: no errno, no thread-local state, no cancellation
// point, nothing a sanitizer intercepts. For code that runs in a process made by a raw clone, where
// libc must not be used; all other code calls libc.
#pragma once

#include <sys/syscall.h>

// Switches off all instrumentation of a function: sanitizer callbacks would use thread-local state
// that such a process shares with, or copied from, another one.
#if defined(__clang__)
#define OVERMIND_UNINSTRUMENTED __attribute__((disable_sanitizer_instrumentation))
#else
#define OVERMIND_UNINSTRUMENTED __attribute__((no_sanitize("address", "thread", "undefined")))
#endif

namespace overmind {

// The result, or -errno.
#if defined(__x86_64__)
OVERMIND_UNINSTRUMENTED inline long raw_syscall(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0,
                                                long f = 0) {
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  long result = number;
  asm volatile("syscall" : "+a"(result) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
  return result;
}
#elif defined(__aarch64__)
OVERMIND_UNINSTRUMENTED inline long raw_syscall(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0,
                                                long f = 0) {
  register long x8 asm("x8") = number;
  register long x0 asm("x0") = a;
  register long x1 asm("x1") = b;
  register long x2 asm("x2") = c;
  register long x3 asm("x3") = d;
  register long x4 asm("x4") = e;
  register long x5 asm("x5") = f;
  asm volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}
#else
#error "raw_syscall: x86-64 and arm64 only so far; add this machine's calling convention here"
#endif

}  // namespace overmind
