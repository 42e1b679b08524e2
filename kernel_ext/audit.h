// SPDX-License-Identifier: MIT
// Which paths a load opens, as the interpreter's audit events tell. The hook can't be removed once
// installed (CPython has no way to), so it is installed by the first recording and costs one branch when idle.
// Thread safety: a recording belongs to the thread that started it; call with the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace overmind {

// Nests by counting.
void start_recording();
// [(event, absolute path, mode)] of the outermost recording; an empty list for inner ones.
pybind11::list stop_recording();

}  // namespace overmind
