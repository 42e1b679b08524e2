// SPDX-License-Identifier: MIT
// Running a program in a process that was forked from an interpreter's main module, such that nothing of that module
// is left on the stack: tracebacks, sys._getframe() and exit are the interpreter's own.
#pragma once

#include <pybind11/pybind11.h>

namespace overmind {

void add_main_program(pybind11::module_& module);

}  // namespace overmind
