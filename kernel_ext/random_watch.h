// SPDX-License-Identifier: MIT
// When Python code draws random numbers from the system while a recording runs, `note_draw` of overmind/recording.py is
// told, on the thread that draws, with the frames as they are: whose draw it is only they can say. Watched are the
// interpreter's own imports of libc's functions (os.urandom, and all that stands on it) and what ctypes hands out. What
// compiled libraries draw for themselves is not: Rust's hash maps, OpenSSL, std::random_device.
#pragma once

#include <span>

#include "kernel_ext/imported_functions.h"

namespace overmind {

std::span<const Replacement> random_replacements();

// True for the devices that random numbers are read from.
bool is_random_device(const char* path);

// Takes the GIL if this thread is Python's; does nothing in any other. Never fails, and leaves errno alone.
void tell_of_draw(const char* source);

}  // namespace overmind
