// SPDX-License-Identifier: MIT
#include "kernel_ext/errors.h"

#include <array>
#include <string>

namespace overmind {
namespace py = pybind11;
namespace {

struct Row {
  Code code;
  const char* name;
  const char* doc;
  PyObject* type;  // owned for the life of the process
};

std::array<Row, 8> table = {{
    {Code::kNotFound, "NotFoundError", "No such entry.", nullptr},
    {Code::kUnavailable, "UnavailableError", "No daemon can be reached or started.", nullptr},
    {Code::kExhausted, "ExhaustedError", "Memory, budget, descriptors or a resource limit are used up.", nullptr},
    {Code::kDenied, "DeniedError", "Wrong owner, wrong mode, a symlink, or a foreign peer.", nullptr},
    {Code::kInvalid, "InvalidError", "Malformed bytes or values from outside.", nullptr},
    {Code::kTimeout, "TimeoutError", "A deadline passed.", nullptr},
    {Code::kVersion, "VersionError", "The other side speaks another protocol.", nullptr},
    {Code::kIo, "IoError", "A system call failed.", nullptr},
}};

PyObject* base = nullptr;

PyObject* new_exception(py::module_& module, const char* name, const char* doc, PyObject* parent) {
  PyObject* type = PyErr_NewExceptionWithDoc(("overmind._core." + std::string(name)).c_str(), doc, parent, nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.attr(name) = py::handle(type);
  return type;
}

py::object make_error(Code code, const std::string& message) {
  for (const Row& row : table)
    if (row.code == code) return py::reinterpret_borrow<py::object>(row.type)(message);
  return py::reinterpret_borrow<py::object>(base)(message);
}

py::object error_of(const std::string& code, const std::string& message) {
  for (const Row& row : table)
    if (code_name(row.code) == code) return make_error(row.code, Status(row.code, message).to_string());
  throw py::value_error("no such code: " + code);
}

}  // namespace

void add_errors(py::module_& module) {
  base = new_exception(module, "OvermindError", "The store can't do what was asked.", PyExc_RuntimeError);
  for (Row& row : table) row.type = new_exception(module, row.name, row.doc, base);
  module.def("error", &error_of, py::arg("code"), py::arg("message"));
}

void raise(const Status& status) {
  const py::object error = make_error(status.code(), status.to_string());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace overmind
