// SPDX-License-Identifier: MIT
#include "kernel_ext/containers.h"

#include <algorithm>
#include <array>
#include <utility>
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

// One name of nn.Module's constructor and the kind of container that stands there; null for anything else.
struct Table {
  PyObject* name;
  PyObject* kind;
};

// As overmind.quirks.nn_modules.tables() tells them, once; kept for good. No static initialiser asks: it would hold its
// lock over an import, which lets other threads in.
const std::vector<Table>& module_tables() {
  static const std::vector<Table>* known = nullptr;  // guarded by the GIL
  if (known != nullptr) return *known;
  const py::tuple standard = py::module_::import("overmind.quirks.nn_modules").attr("tables")();
  std::vector<Table> found;
  for (const py::handle entry : standard) {
    const auto [name, kind] = entry.cast<std::pair<py::object, py::object>>();
    found.push_back({name.inc_ref().ptr(), kind.is_none() ? nullptr : kind.inc_ref().ptr()});
  }
  known = new std::vector<Table>(std::move(found));  // NOLINT: for good
  return *known;
}

PyObject* container_of(PyObject* kind) {
  if (kind == nullptr) return Py_NewRef(Py_None);
  if (kind == reinterpret_cast<PyObject*>(&PyODict_Type)) return PyODict_New();
  if (kind == reinterpret_cast<PyObject*>(&PyDict_Type)) return PyDict_New();
  return PySet_New(nullptr);
}

py::object make_module(PyObject* kind) {
  if (!PyType_Check(kind)) throw py::type_error("new_module() takes a class");
  auto* const type = reinterpret_cast<PyTypeObject*>(kind);
  auto module = py::reinterpret_steal<py::object>(type->tp_new(type, py::tuple().ptr(), nullptr));
  if (!module) throw py::error_already_set();
  const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
  if (!dict) throw py::error_already_set();
  for (const Table& table : module_tables()) {
    const auto value = py::reinterpret_steal<py::object>(container_of(table.kind));
    if (!value || PyDict_SetItem(dict.ptr(), table.name, value.ptr()) != 0) throw py::error_already_set();
  }
  return module;
}

// A plain C function, since pickle calls it for each module: pybind11 and Python had 0.9 of the 1.6 ms that the
// skeleton of a Llama with 216 modules took.
PyObject* new_module(PyObject*, PyObject* kind) {
  try {
    return make_module(kind).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  }
  return nullptr;
}

std::array<PyMethodDef, 2> plain_functions = {{
    {"new_module", new_module, METH_O, "See _core.pyi."},
    {nullptr, nullptr, 0, nullptr},
}};

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
  if (PyModule_AddFunctions(module.ptr(), plain_functions.data()) != 0) throw py::error_already_set();
}

}  // namespace overmind
