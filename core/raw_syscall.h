// SPDX-License-Identifier: MIT
// System calls that touch nothing but registers: no errno, no thread-local state, no cancellation
// point, nothing a sanitizer intercepts. For code that runs in a process made by a raw clone, where
// libc must not be used; all other code calls libc.
#pragma once

#include <sys/syscall.h>

// Switches off all instrumentation of a function: sanitizer callbacks would use thread-local state
// that such a process shares with, or copied from, another one.
#if defined(__clang__)  // the first alone leaves ASan's call before a noreturn one, the second TSan's function entry
#define OVERMIND_UNINSTRUMENTED \
  __attribute__((disable_sanitizer_instrumentation, no_sanitize("address", "thread", "undefined")))
#else
#define OVERMIND_UNINSTRUMENTED __attribute__((no_sanitize("address", "thread", "undefined")))
#endif

namespace overmind {

// raw_syscall: the result, or -errno.
//
// raw_clone: clone(2) with a stack for the child, which runs function(argument); that must never return.
// libc's own clone is not used because sanitizers (and whoever else interposes it) run code of theirs in
// both processes, which goes wrong as soon as CLONE_VM makes their state one. `stack_top`: 16-byte aligned.
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

OVERMIND_UNINSTRUMENTED inline long raw_clone(long flags, void* stack_top, void (*function)(void*), void* argument) {
  register void (*r12)(void*) asm("r12") = function;
  register void* r13 asm("r13") = argument;
  register long r10 asm("r10") = 0;
  register long r8 asm("r8") = 0;
  long result = SYS_clone;
  asm volatile(
      "syscall\n\t"
      "test %%rax, %%rax\n\t"
      "jnz 1f\n\t"
      "xor %%ebp, %%ebp\n\t"
      "mov %%r13, %%rdi\n\t"
      "call *%%r12\n\t"
      "ud2\n"
      "1:"
      : "+a"(result)
      : "D"(flags), "S"(stack_top), "d"(0L), "r"(r10), "r"(r8), "r"(r12), "r"(r13)
      : "rcx", "r11", "memory", "cc");
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

OVERMIND_UNINSTRUMENTED inline long raw_clone(long flags, void* stack_top, void (*function)(void*), void* argument) {
  register long x8 asm("x8") = SYS_clone;
  register long x0 asm("x0") = flags;
  register void* x1 asm("x1") = stack_top;
  register long x2 asm("x2") = 0;
  register long x3 asm("x3") = 0;
  register long x4 asm("x4") = 0;
  register void (*x19)(void*) asm("x19") = function;
  register void* x20 asm("x20") = argument;
  asm volatile(
      "svc #0\n\t"
      "cbnz x0, 1f\n\t"
      "mov x29, xzr\n\t"
      "mov x0, x20\n\t"
      "blr x19\n\t"
      "brk #0\n"
      "1:"
      : "+r"(x0)
      : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x19), "r"(x20)
      : "memory", "cc");
  return x0;
}
#else
#error "raw_syscall.h: x86-64 and arm64 only so far; add this machine's calling convention here"
#endif

}  // namespace overmind
