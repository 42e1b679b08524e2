// SPDX-License-Identifier: MIT
// overmind._core.Segment: a mapping as Python sees it, and everything that keeps it alive.
// Thread safety: with the GIL, except what a capsule's retain and release do.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "core/client.h"

namespace overmind {

// The same mapping, whose last owner tells `client` that this process maps the entry no more. That may be a
// storage freed on any thread, at any time, in a forked child too (where the client is not told: the
// mapping was the parent's, and another thread may have held the client's lock when it forked).
std::shared_ptr<Mapping> tell_when_unmapped(std::shared_ptr<Client> client, std::shared_ptr<Mapping> mapping);

class Segment {
 public:
  explicit Segment(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}
  const Manifest& manifest() const { return mapping_->manifest(); }
  pybind11::bytes meta() const;
  pybind11::object view(Range range, bool readonly) const;
  pybind11::object buffer(pybind11::ssize_t index) const;
  pybind11::object capsule() const;

 private:
  std::shared_ptr<Mapping> mapping_;
};

// Binds Segment, and make_segment(), which needs no daemon.
void add_segment(pybind11::module_& module);

}  // namespace overmind
