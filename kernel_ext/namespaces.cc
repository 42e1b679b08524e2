// SPDX-License-Identifier: MIT
#include "kernel_ext/namespaces.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace overmind {
namespace py = pybind11;
namespace {

py::object dict_of(py::handle holder) {
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
  if (!dict || !PyDict_Check(dict.ptr())) throw py::type_error("neither a class nor a module nor a dict");
  return dict;
}

py::bytes identities(py::handle holder) {
  const py::object dict = dict_of(holder);
  std::vector<PyObject*> values;
  values.reserve(static_cast<std::size_t>(PyDict_Size(dict.ptr())));
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  while (PyDict_Next(dict.ptr(), &position, nullptr, &value) != 0) {
    values.push_back(value);
    if (!PyFunction_Check(value)) continue;
    values.push_back(PyFunction_GetCode(value));
    values.push_back(PyFunction_GetDefaults(value));
    values.push_back(PyFunction_GetKwDefaults(value));
  }
  if (PyType_Check(holder.ptr())) {
    PyObject* const bases = reinterpret_cast<PyTypeObject*>(holder.ptr())->tp_mro;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); ++i) values.push_back(PyTuple_GET_ITEM(bases, i));
  }
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(PyObject*)};
}

bool contains(py::handle set, py::handle value) {
  const int found = PySet_Contains(set.ptr(), value.ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

// An exact class or set of them has no code of its own that a question could run.
bool is_plain_class(py::handle value) { return Py_TYPE(value.ptr()) == &PyType_Type; }

// Not decorated, and of a module in `quiet`.
bool is_quiet_function(py::handle function, py::handle quiet) {
  PyObject* const attributes = reinterpret_cast<PyFunctionObject*>(function.ptr())->func_dict;
  if (attributes != nullptr && PyDict_Size(attributes) > 0) return false;
  PyObject* const module = PyDict_GetItemString(PyFunction_GetGlobals(function.ptr()), "__name__");
  return module != nullptr && PyUnicode_CheckExact(module) && contains(quiet, module);
}

// As its own namespace says: a metaclass may have an answer of its own. False for what says nothing: a type of C.
bool is_quiet_class(py::handle value, py::handle quiet) {
  if (!PyType_Check(value.ptr())) return false;
  const py::object dict = dict_of(value);
  PyObject* const module = PyDict_GetItemString(dict.ptr(), "__module__");
  if (module != nullptr) return PyUnicode_CheckExact(module) && contains(quiet, module);
  return is_plain_class(value) && contains(quiet, value.attr("__module__"));
}

// What a class method, a property or a cache is made of, of these exact types; empty for all else.
std::vector<py::object> parts_of(py::handle value) {
  static const py::handle cache = py::object(py::module_::import("functools").attr("_lru_cache_wrapper")).release();
  PyTypeObject* const kind = Py_TYPE(value.ptr());
  if (kind == &PyClassMethod_Type || kind == &PyStaticMethod_Type) return {value.attr("__func__")};
  if (kind == &PyProperty_Type) return {value.attr("fget"), value.attr("fset"), value.attr("fdel")};
  if (reinterpret_cast<PyObject*>(kind) == cache.ptr()) return {value.attr("__wrapped__")};
  return {};
}

bool is_undecorated(py::handle function, py::handle own, py::handle quiet) {
  if (!PyFunction_Check(function.ptr())) return false;
  PyObject* const attributes = reinterpret_cast<PyFunctionObject*>(function.ptr())->func_dict;
  if (attributes != nullptr && PyDict_Size(attributes) > 0) return false;
  return PyFunction_GetGlobals(function.ptr()) == own.ptr() || is_quiet_function(function, quiet);
}

bool is_made_of_quiet_functions(py::handle value, py::handle own, py::handle quiet) {
  const std::vector<py::object> parts = parts_of(value);
  return !parts.empty() && std::all_of(parts.begin(), parts.end(), [&](const py::object& part) {
    return part.is_none() || is_undecorated(part, own, quiet);
  });
}

// Its code was written elsewhere, or it has default values, which are nobody's to see in its code.
bool is_changeable(py::handle function, py::handle file, bool has_defaults) {
  if (has_defaults &&
      (PyFunction_GetDefaults(function.ptr()) != nullptr || PyFunction_GetKwDefaults(function.ptr()) != nullptr))
    return true;
  PyObject* const written = reinterpret_cast<PyCodeObject*>(PyFunction_GetCode(function.ptr()))->co_filename;
  return file && written != file.ptr() && PyUnicode_Check(file.ptr()) && PyUnicode_Compare(written, file.ptr()) != 0;
}

bool is_notable(py::handle value, py::handle own, py::handle quiet, py::handle silent) {
  const py::handle kind(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())));
  if (is_plain_class(kind) && contains(silent, kind)) return false;
  if (PyFunction_Check(value.ptr())) return !is_quiet_function(value, quiet);
  return !is_quiet_class(value, quiet) && !is_made_of_quiet_functions(value, own, quiet);
}

bool is_dunder(py::handle name) {
  return PyUnicode_Check(name.ptr()) && PyUnicode_GET_LENGTH(name.ptr()) > 1 &&
         PyUnicode_READ_CHAR(name.ptr(), 0) == '_' && PyUnicode_READ_CHAR(name.ptr(), 1) == '_';
}

py::list notable(py::handle holder, const py::dict& own, const py::set& quiet, const py::set& silent) {
  const py::object dict = dict_of(holder);
  const bool is_module = PyModule_Check(holder.ptr());
  const bool is_table = dict.is(holder);
  py::list found;
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* member = nullptr;
  const py::handle file = PyDict_GetItemString(own.ptr(), "__file__");
  while (PyDict_Next(dict.ptr(), &position, &name, &member) != 0) {
    if (is_module && is_dunder(name)) continue;
    const bool packed = is_table && PyTuple_CheckExact(member) && PyTuple_GET_SIZE(member) > 0;
    const py::handle value(packed ? PyTuple_GET_ITEM(member, 0) : member);
    const bool is_own = PyFunction_Check(value.ptr()) && PyFunction_GetGlobals(value.ptr()) == own.ptr();
    if (is_own ? is_changeable(value, file, PyType_Check(holder.ptr())) : is_notable(value, own, quiet, silent))
      found.append(py::make_tuple(py::handle(name), value));
  }
  return found;
}

}  // namespace

void add_namespaces(py::module_& module) {
  module.def("identities", &identities, py::arg("holder"));
  module.def("notable", &notable, py::arg("holder"), py::arg("own"), py::arg("quiet"), py::arg("silent"));
}

}  // namespace overmind
