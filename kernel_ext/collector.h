// SPDX-License-Identifier: MIT
// Python's garbage collector during a load; see overmind/collector.py. In C++, for a signal's exception comes between
// two steps of Python code: it would leave the collector switched off. With the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace overmind {

// Adds CollectorOff and YoungOnly, described in _core.pyi.
void add_collector(pybind11::module_& module);

}  // namespace overmind
