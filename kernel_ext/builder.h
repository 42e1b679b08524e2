// SPDX-License-Identifier: MIT
// Builds every tensor of an entry over this process's private pages, in one call: 1,815 tensors in
// about 2 ms, where their Python rebuild functions need 20. Thread safety: with the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "kernel_ext/segment_capsule.h"

namespace overmind {

// Item i of the list is what persistent id i stood for. Each storage holds a retain() of view.owner until it
// is freed or resized, on whatever thread that happens. Throws std::invalid_argument for malformed records.
pybind11::list build(const SegmentView& view, const pybind11::list& substitutes);

}  // namespace overmind
