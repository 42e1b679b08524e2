// SPDX-License-Identifier: MIT
// overmind._core.Segment: a mapping as Python sees it, and everything that keeps it alive.
// Thread safety: with the GIL, except what a capsule's retain and release do.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <span>
#include <vector>

#include "core/client.h"
#include "kernel_ext/borrowed.h"
#include "kernel_ext/segment_capsule.h"

namespace overmind {

// The same mapping, whose last owner tells `client` that this process maps the entry no more. That may be a
// storage freed on any thread, at any time, in a forked child too (where the client is not told: the
// mapping was the parent's, and another thread may have held the client's lock when it forked).
std::shared_ptr<Mapping> tell_when_unmapped(std::shared_ptr<Client> client, std::shared_ptr<Mapping> mapping);

class Segment {
 public:
  explicit Segment(std::shared_ptr<Mapping> mapping);
  const Manifest& manifest() const { return memory_->mapping->manifest(); }
  // Puts borrowed buffers in their places: `files` are (path, dev, ino, size, mtime_ns, ctime_ns), `borrowed` are
  // (buffer, file, offset, nbytes). Throws what Status says if a file is not exactly the one recorded.
  void attach(const pybind11::sequence& files, const pybind11::sequence& borrowed);
  pybind11::bytes meta() const;
  pybind11::object view(Range range, bool readonly) const;
  pybind11::object buffer(pybind11::ssize_t index) const;
  pybind11::object capsule() const;

 private:
  // Everything that a tensor or a view of this entry must keep alive.
  struct Memory {
    std::shared_ptr<Mapping> mapping;
    std::vector<std::shared_ptr<BorrowedFile>> files;
    std::vector<BufferView> buffers;
  };
  friend struct View;
  friend struct Owner;
  pybind11::object view(std::span<std::byte> bytes, bool readonly) const;

  std::shared_ptr<Memory> memory_;
};

// Binds Segment, and make_segment(), which needs no daemon.
void add_segment(pybind11::module_& module);

}  // namespace overmind
