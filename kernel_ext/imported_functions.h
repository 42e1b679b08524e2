// SPDX-License-Identifier: MIT
// Puts functions of ours in the place of imported ones, in every shared object of this process: what an object
// imports it calls through slots that the dynamic linker filled, and those are filled anew. LD_PRELOAD does the
// same, but has to be there when the process starts. x86-64 and AArch64 with glibc.
//
// Not reached: a function called inside the object that defines it (libc's own fopen -> open), and system calls that
// are made without libc. Objects that come later are reached by the next call of replace_imports().
#pragma once

#include <span>

namespace overmind {

struct Replacement {
  const char* name;      // of the imported function
  void* function;        // same signature; must call the original by its name, from this object
  bool loaders = false;  // only in objects that load others for Python: the interpreter and _ctypes
};

// A function as Replacement takes it.
template <typename Function>
void* address_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

// Fills the slots of all objects that were not seen by an earlier call. `replacements` must be the same, and live as
// long, in all calls. About 3 ms for the 300 objects of a process with torch, 2 us when there is no new one.
// Thread-safe; no other thread is stopped: a slot changes in one store.
void replace_imports(std::span<const Replacement> replacements);

// Puts the originals back. Thread-safe.
void restore_imports();

}  // namespace overmind
