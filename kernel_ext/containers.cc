// SPDX-License-Identifier: MIT
#include "kernel_ext/containers.h"

#include <algorithm>
#include <vector>

namespace overmind {
namespace py = pybind11;
namespace {

// Empty, of exactly this kind, known to nobody else, and without attributes of its own.
bool is_spare(PyObject* value, py::handle kind) {
  if (kind.is_none() || py::handle(reinterpret_cast<PyObject*>(Py_TYPE(value))).ptr() != kind.ptr()) return false;
  if (Py_REFCNT(value) != 1) return false;
  if (PySet_Check(value)) return PySet_GET_SIZE(value) == 0;
  if (!PyDict_Check(value) || PyDict_Size(value) != 0) return false;
  if (PyDict_CheckExact(value)) return true;
  const py::object attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(value, nullptr));
  if (!attributes) throw py::error_already_set();
  return PyDict_Size(attributes.ptr()) == 0;
}

py::object trimmed_state(const py::dict& state, const py::tuple& standard) {
  py::dict kept;
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (const py::handle entry : standard) {
    const auto expected = py::reinterpret_borrow<py::tuple>(entry);
    if (PyDict_Next(state.ptr(), &position, &name, &value) == 0) return py::none();
    if (!py::handle(name).equal(expected[0])) return py::none();
    if (!is_spare(value, expected[1])) kept[py::handle(name)] = py::handle(value);
  }
  while (PyDict_Next(state.ptr(), &position, &name, &value) != 0) kept[py::handle(name)] = py::handle(value);
  return kept;
}

void fill_state(py::dict state, const py::tuple& standard) {
  for (const py::handle entry : standard) {
    const auto expected = py::reinterpret_borrow<py::tuple>(entry);
    const py::object kind = expected[1];
    state[expected[0]] = kind.is_none() ? py::none() : kind();
  }
}

// Types are compared by identity, so none of their code is asked.
bool is_one_of(PyObject* value, const std::vector<PyTypeObject*>& kinds) {
  return std::find(kinds.begin(), kinds.end(), Py_TYPE(value)) != kinds.end();
}

bool are_ones_of(PyObject* value, const std::vector<PyTypeObject*>& kinds, bool in_tuples) {
  if (!in_tuples) return is_one_of(value, kinds);
  if (!PyTuple_CheckExact(value)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
    if (!is_one_of(PyTuple_GET_ITEM(value, i), kinds)) return false;
  return true;
}

bool holds_only(py::handle table, const py::iterable& kinds) {
  std::vector<PyTypeObject*> wanted;
  for (const py::handle kind : kinds) wanted.push_back(reinterpret_cast<PyTypeObject*>(kind.ptr()));
  if (PyDict_CheckExact(table.ptr())) {
    Py_ssize_t position = 0;
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(table.ptr(), &position, &name, &value) != 0)
      if (!is_one_of(name, wanted) || !is_one_of(value, wanted)) return false;
    return true;
  }
  if (!PyList_CheckExact(table.ptr())) throw py::type_error("holds_only() takes a dict or a list");
  const Py_ssize_t size = PyList_GET_SIZE(table.ptr());
  const bool in_tuples = size > 0 && PyTuple_CheckExact(PyList_GET_ITEM(table.ptr(), 0));
  for (Py_ssize_t i = 0; i < size; ++i)
    if (!are_ones_of(PyList_GET_ITEM(table.ptr(), i), wanted, in_tuples)) return false;
  return true;
}

}  // namespace

void add_containers(py::module_& module) {
  module.def("trimmed_state", &trimmed_state, py::arg("state"), py::arg("standard"));
  module.def("holds_only", &holds_only, py::arg("table"), py::arg("kinds"));
  module.def("fill_state", &fill_state, py::arg("state"), py::arg("standard"));
}

}  // namespace overmind
