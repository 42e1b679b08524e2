// SPDX-License-Identifier: MIT
// The one place where a core Code becomes a Python exception. tests/python/test_errors.py tries every row.
#pragma once

#include <pybind11/pybind11.h>

#include "core/status.h"

namespace overmind {

// Makes OvermindError and one subclass per Code in `module`. Call once, before anything else here.
void add_errors(pybind11::module_& module);

// REQUIRES: !status.ok(), the GIL. Throws the exception that stands for status.code(); its text is the
// status's message, code name first.
[[noreturn]] void raise(const Status& status);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}

}  // namespace overmind
