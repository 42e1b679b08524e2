// SPDX-License-Identifier: MIT
// What stands in the namespaces of classes and modules, for overmind/foreign_code.py: it looks at some ten thousand
// members of libraries in a process. With the GIL; runs no Python code.
#pragma once

#include <pybind11/pybind11.h>

namespace overmind {

// Adds identities() and notable(), described in _core.pyi.
void add_namespaces(pybind11::module_& module);

}  // namespace overmind
