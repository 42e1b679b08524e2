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

constexpr int kMostWrappers = 20;  // around one function; more are a cycle

// What functools.wraps() says that a function wraps; null if nothing.
py::handle wrapped_by(py::handle function) {
  static PyObject* const name = PyUnicode_InternFromString("__wrapped__");
  PyObject* const attributes = reinterpret_cast<PyFunctionObject*>(function.ptr())->func_dict;
  return attributes == nullptr ? nullptr : PyDict_GetItem(attributes, name);
}

// Calls visit(function) for `value`, if it is one, and for all that it wraps.
template <typename Visit>
void each_wrapped(py::handle value, Visit visit) {
  for (int i = 0; i < kMostWrappers && value && PyFunction_Check(value.ptr()); ++i) {
    visit(value);
    value = wrapped_by(value);
  }
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

// As each_wrapped(), for all functions that a class's member is made of.
template <typename Visit>
void each_function(py::handle member, Visit visit) {
  each_wrapped(member, visit);
  for (const py::object& part : parts_of(member)) each_wrapped(part, visit);
}

void add_function(py::handle function, std::vector<PyObject*>& values) {
  values.push_back(function.ptr());
  values.push_back(PyFunction_GetCode(function.ptr()));
  // Not the tuple or the dict: the one may be freed and its address the next one's, the other be changed where it is.
  PyObject* const defaults = PyFunction_GetDefaults(function.ptr());
  const Py_ssize_t count = defaults == nullptr ? 0 : PyTuple_GET_SIZE(defaults);
  for (Py_ssize_t i = 0; i < count; ++i) values.push_back(PyTuple_GET_ITEM(defaults, i));
  values.push_back(nullptr);
  PyObject* const by_name = PyFunction_GetKwDefaults(function.ptr());
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  while (by_name != nullptr && PyDict_Next(by_name, &position, &name, &value) != 0) {
    values.push_back(name);
    values.push_back(value);
  }
  values.push_back(nullptr);
}

py::bytes identities(py::handle holder) {
  std::vector<PyObject*> values;
  const auto add = [&](py::handle function) { add_function(function, values); };
  const auto done = [&] {
    return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(PyObject*));
  };
  if (PyFunction_Check(holder.ptr())) {
    each_wrapped(holder, add);
    return done();
  }
  const py::object dict = dict_of(holder);
  const bool is_class = PyType_Check(holder.ptr());
  const bool is_module = PyModule_Check(holder.ptr());
  values.reserve(static_cast<std::size_t>(PyDict_Size(dict.ptr())));
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  while (PyDict_Next(dict.ptr(), &position, nullptr, &value) != 0) {
    if (is_module && PyModule_Check(value)) continue;
    values.push_back(value);
    if (is_class)
      each_function(value, add);
    else
      each_wrapped(value, add);
  }
  if (is_class) {
    PyObject* const bases = reinterpret_cast<PyTypeObject*>(holder.ptr())->tp_mro;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); ++i) values.push_back(PyTuple_GET_ITEM(bases, i));
  }
  return done();
}

bool contains(py::handle set, py::handle value) {
  const int found = PySet_Contains(set.ptr(), value.ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

// An exact class or set of them has no code of its own that a question could run.
bool is_plain_class(py::handle value) { return Py_TYPE(value.ptr()) == &PyType_Type; }

// Whose code is no change: modules whose top-level package is in `tops`; `quiet` keeps those that were met.
struct Accepted {
  py::set quiet;
  py::frozenset tops;

  bool has(py::handle module) const {
    if (module.ptr() == nullptr || !PyUnicode_CheckExact(module.ptr())) return false;
    if (contains(quiet, module)) return true;
    const Py_ssize_t length = PyUnicode_GET_LENGTH(module.ptr());
    const Py_ssize_t dot = PyUnicode_FindChar(module.ptr(), '.', 0, length, 1);
    if (dot == -2) throw py::error_already_set();
    const auto top = py::reinterpret_steal<py::object>(PyUnicode_Substring(module.ptr(), 0, dot < 0 ? length : dot));
    if (!top) throw py::error_already_set();
    if (!contains(tops, top)) return false;
    if (PySet_Add(quiet.ptr(), module.ptr()) != 0) throw py::error_already_set();
    return true;
  }
};

// It and what it wraps are of accepted modules; of `own` globals is as good.
bool is_quiet_function(py::handle function, py::handle own, const Accepted& accepted) {
  for (int i = 0; i < kMostWrappers; ++i) {
    if (!PyFunction_Check(function.ptr())) return false;
    PyObject* const globals = PyFunction_GetGlobals(function.ptr());
    if (globals != own.ptr() && !accepted.has(PyDict_GetItemString(globals, "__name__"))) return false;
    function = wrapped_by(function);
    if (!function) return true;
  }
  return false;
}

// As its own namespace says: a metaclass may have an answer of its own. False for what says nothing: a type of C.
bool is_quiet_class(py::handle value, const Accepted& accepted) {
  const py::object dict = dict_of(value);
  PyObject* const module = PyDict_GetItemString(dict.ptr(), "__module__");
  if (module != nullptr) return accepted.has(module);
  return is_plain_class(value) && accepted.has(value.attr("__module__"));
}

bool is_made_of_quiet_functions(py::handle value, py::handle own, const Accepted& accepted) {
  const std::vector<py::object> parts = parts_of(value);
  return !parts.empty() && std::all_of(parts.begin(), parts.end(), [&](const py::object& part) {
    return part.is_none() || is_quiet_function(part, own, accepted);
  });
}

// Its code was not written in `file`.
bool is_written_elsewhere(py::handle function, py::handle file) {
  PyObject* const written = reinterpret_cast<PyCodeObject*>(PyFunction_GetCode(function.ptr()))->co_filename;
  return file && written != file.ptr() && PyUnicode_Check(file.ptr()) && PyUnicode_Compare(written, file.ptr()) != 0;
}

// A number, a string, None: as text it is all there is to it, and its text needs no code of anybody's.
bool is_scalar(py::handle value) {
  PyTypeObject* const kind = Py_TYPE(value.ptr());
  return value.is_none() || kind == &PyBool_Type || kind == &PyLong_Type || kind == &PyFloat_Type ||
         kind == &PyUnicode_Type || kind == &PyBytes_Type || kind == &PyComplex_Type;
}

void say(const py::list& lines, py::handle name, const char* sign, py::handle value) {
  if (PyList_Append(lines.ptr(), (py::str(name) + py::str(sign) + py::repr(value)).ptr()) != 0)
    throw py::error_already_set();
}

// Adds a line for its default values; false if one of them is no scalar.
bool says_defaults(py::handle function, py::handle name, const py::list& lines) {
  const py::handle positional(PyFunction_GetDefaults(function.ptr()));
  const py::handle by_name(PyFunction_GetKwDefaults(function.ptr()));
  for (Py_ssize_t i = 0; positional && i < PyTuple_GET_SIZE(positional.ptr()); ++i)
    if (!is_scalar(PyTuple_GET_ITEM(positional.ptr(), i))) return false;
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  while (by_name && PyDict_Next(by_name.ptr(), &position, nullptr, &value) != 0)
    if (!is_scalar(value)) return false;
  for (const py::handle defaults : {positional, by_name})
    if (defaults) say(lines, name, "()=", defaults);
  return true;
}

bool is_notable(py::handle value, py::handle own, const Accepted& accepted, py::handle silent, py::handle only) {
  const py::handle kind(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())));
  if (is_plain_class(kind) && contains(silent, kind)) return false;
  if (PyFunction_Check(value.ptr())) return !is_quiet_function(value, py::handle(), accepted);
  if (PyType_Check(value.ptr())) return !is_quiet_class(value, accepted);
  if (!only.is_none() && !(is_plain_class(kind) && contains(only, kind))) return false;
  return !is_made_of_quiet_functions(value, own, accepted);
}

bool is_dunder(py::handle name) {
  return PyUnicode_Check(name.ptr()) && PyUnicode_GET_LENGTH(name.ptr()) > 1 &&
         PyUnicode_READ_CHAR(name.ptr(), 0) == '_' && PyUnicode_READ_CHAR(name.ptr(), 1) == '_';
}

py::list notable(py::handle holder, const py::dict& own, const py::set& quiet, const py::frozenset& tops,
                 const py::set& silent, const py::object& only, const py::set& unsaid, const py::list& lines) {
  const Accepted accepted{quiet, tops};
  const py::object dict = dict_of(holder);
  const bool is_class = PyType_Check(holder.ptr());
  const bool is_module = PyModule_Check(holder.ptr());
  const bool is_table = dict.is(holder);
  py::list found;
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* member = nullptr;
  const py::handle file = PyDict_GetItemString(own.ptr(), "__file__");
  while (PyDict_Next(dict.ptr(), &position, &name, &member) != 0) {
    if (is_module && is_dunder(name)) continue;
    if (is_class && PyUnicode_CheckExact(name) && contains(unsaid, name)) continue;
    if (is_class && is_scalar(member)) {
      if (!is_dunder(name)) say(lines, name, "=", member);
      continue;
    }
    const bool packed = is_table && PyTuple_CheckExact(member) && PyTuple_GET_SIZE(member) > 0;
    const py::handle value(packed ? PyTuple_GET_ITEM(member, 0) : member);
    bool is_told = true;  // all that there is to say of it
    if (is_class) {
      each_function(value, [&](py::handle function) {
        if (PyFunction_GetGlobals(function.ptr()) == own.ptr() && is_written_elsewhere(function, file)) is_told = false;
        is_told = says_defaults(function, name, lines) && is_told;
      });
    }
    const bool is_own = PyFunction_Check(value.ptr()) && PyFunction_GetGlobals(value.ptr()) == own.ptr();
    const bool is_quiet = is_own ? !is_written_elsewhere(value, file) : !is_notable(value, own, accepted, silent, only);
    if (!is_told || !is_quiet) found.append(py::make_tuple(py::handle(name), value));
  }
  return found;
}

}  // namespace

void add_namespaces(py::module_& module) {
  module.def("identities", &identities, py::arg("holder"));
  module.def("notable", &notable, py::arg("holder"), py::arg("own"), py::arg("quiet"), py::arg("tops"),
             py::arg("silent"), py::arg("only"), py::arg("unsaid"), py::arg("lines"));
}

}  // namespace overmind
