// SPDX-License-Identifier: MIT
// overmind._core.Client, Lease, Busy, Publication, Config: core/client.h for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace overmind {

void add_config(pybind11::module_& module);
void add_client(pybind11::module_& module);

}  // namespace overmind
