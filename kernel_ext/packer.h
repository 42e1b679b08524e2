// SPDX-License-Identifier: MIT
// Takes tensors and storages out of a pickle while it is written.
//
// Pickler calls persistent_id() for every object it meets, 100,000 times for a big pipeline, so its
// first test is one hash of the object's type. Thread safety: one thread, with the GIL.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernel_ext/tensor_records.h"

namespace overmind {

class Packer {
 public:
  // `substitutes`: {id(object): number}. `inspector_of`: None, or a callable that is asked once per
  // type and gives None or a callable that is called with each object of that type and raises to refuse it.
  Packer(const py::dict& substitutes, py::object inspector_of);

  // The next integer for what goes out of band, None for the rest. Throws std::invalid_argument with
  // a readable reason for a tensor that can't be kept exactly.
  py::object persistent_id(PyObject* object);

  // (records, [(address, nbytes)], objects that keep the addresses alive)
  py::tuple finish();

 private:
  enum class Verdict : std::uint8_t { kPlain, kTensor, kParameter, kTensorSubclass, kUntypedStorage, kTypedStorage };
  struct TypeEntry {
    Verdict verdict;
    PyObject* inspector;  // owned by kept_; null when objects of this type need no look
  };

  const TypeEntry& classify(PyTypeObject* type);
  TypeEntry judge(PyTypeObject* type);
  py::object tensor_id(PyObject* object, Verdict verdict);
  py::object storage_id(PyObject* object, PyObject* untyped, ItemKind kind, c10::ScalarType dtype);
  // Index of the storage in the records; the same impl gives the same index.
  std::uint32_t storage_index(const c10::Storage& storage);
  py::object add_item(PyObject* object, const ItemRecord& record, c10::IntArrayRef sizes = {},
                      c10::IntArrayRef strides = {});

  std::unordered_map<PyObject*, std::uint32_t> substitutes_;
  py::object inspector_of_;
  std::unordered_map<PyTypeObject*, TypeEntry> types_;
  std::unordered_map<PyObject*, py::object> ids_;  // of everything that got one
  std::unordered_map<c10::StorageImpl*, std::uint32_t> storage_indices_;
  std::vector<StorageRecord> storages_;
  std::vector<std::pair<std::uintptr_t, std::uint64_t>> buffers_;
  std::string items_;
  std::uint32_t item_count_ = 0;
  py::list attributes_;
  py::list kept_;  // types, inspectors and items: an address seen once must not come back as another object
};

}  // namespace overmind
