// SPDX-License-Identifier: MIT
// Which files and folders a load opens. Told twice, and both are needed: the interpreter's audit events know what
// Python code lists and which processes it starts; the functions of libc that open files (see imported_functions.h)
// are also called by Rust and C++ code and by threads that no recording runs on: safetensors, tokenizers, a thread
// pool. Both are installed by the first recording; idle, a call costs one branch. The audit hook can't be removed
// (CPython has no way to), the others are by stop_watching().
//
// Thread safety: a recording belongs to the thread that started it; call with the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace overmind {

// Nests by counting.
void start_recording();

// [(event, absolute path, mode)] of the outermost recording; an empty list for inner ones. Events: "open",
// "os.listdir", "os.scandir", and "process" with the name of the audit event as path. What a thread opens goes to its
// own recording if it has one, else to every recording; writes only if the thread is younger than the recording.
pybind11::list stop_recording();

// Whether what this thread does now belongs to a recording, maybe; quick if none runs. In a child that was not forked
// by libc (vfork, clone) nothing does.
bool is_watching();

// Puts libc's functions back until the next recording.
void stop_watching();

}  // namespace overmind
