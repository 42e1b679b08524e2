// SPDX-License-Identifier: MIT
// Python's containers, where Python itself would take too long: the __dict__ of nn.Modules without its empty tables
// (overmind/quirks/nn_modules.py), the types in a tokenizer's tables (overmind/quirks/tokenizers.py). With the GIL;
// runs no Python code.
#pragma once

#include <pybind11/pybind11.h>

namespace overmind {

// Adds trimmed_state(), new_module() and holds_only(), described in _core.pyi.
void add_containers(pybind11::module_& module);

}  // namespace overmind
