// SPDX-License-Identifier: MIT
// overmind._core: the store as Python sees it. Types and contracts in _core.pyi. Links neither torch nor numpy.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

#include "kernel_ext/bytes.h"
#include "kernel_ext/client_bindings.h"
#include "kernel_ext/errors.h"
#include "kernel_ext/file_watch.h"
#include "kernel_ext/main_program.h"
#include "kernel_ext/pickle_scan.h"
#include "kernel_ext/segment_object.h"

namespace overmind {
namespace py = pybind11;
namespace {

py::list globals_of(const py::bytes& pickle) {
  py::list result;
  for (const auto& [module, name] : value_or_raise(pickle_globals(as_bytes(pickle))))
    result.append(py::make_tuple(module, name));
  return result;
}

// The addresses of a namespace's values, in its order. 2 ns for each: the loop in Python takes 40.
py::bytes identities(const py::handle holder) {
  py::object dict;
  if (PyType_Check(holder.ptr())) {
#if PY_VERSION_HEX >= 0x030C0000
    dict = py::reinterpret_steal<py::object>(PyType_GetDict(reinterpret_cast<PyTypeObject*>(holder.ptr())));
#else
    dict = py::reinterpret_borrow<py::object>(reinterpret_cast<PyTypeObject*>(holder.ptr())->tp_dict);
#endif
  } else if (PyModule_Check(holder.ptr())) {
    dict = py::reinterpret_borrow<py::object>(PyModule_GetDict(holder.ptr()));
  } else {
    dict = py::reinterpret_borrow<py::object>(holder);
  }
  if (!dict || !PyDict_Check(dict.ptr())) throw py::type_error("identities() takes a class, a module or a dict");
  std::vector<PyObject*> values;
  values.reserve(static_cast<std::size_t>(PyDict_Size(dict.ptr())));
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  while (PyDict_Next(dict.ptr(), &position, nullptr, &value)) values.push_back(value);
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(PyObject*)};
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The store: client of overmindd, segments, watching what a load opens.";
  module.attr("__version__") = OVERMIND_VERSION;
  add_errors(module);
  add_config(module);
  add_segment(module);
  add_client(module);
  add_main_program(module);
  module.def("pickle_globals", &globals_of, py::arg("pickle"));
  module.def("identities", &identities, py::arg("holder"));
  module.def("start_recording", &start_recording);
  module.def("stop_recording", &stop_recording);
  module.def("stop_watching", &stop_watching);
}

}  // namespace overmind
