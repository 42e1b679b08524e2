// SPDX-License-Identifier: MIT
// overmind._torch: bindings of packer.h and builder.h. Types and contracts in _torch.pyi.
#include "kernel_ext/builder.h"
#include "kernel_ext/packer.h"
#include "kernel_ext/segment_capsule.h"

namespace overmind {
namespace {

constexpr char kPackerCapsule[] = "overmind.Packer";

// A plain C function, because pybind11's own dispatch costs five times as much as the work for most
// objects, and this is called for every object of a pickle.
PyObject* call_persistent_id(PyObject* self, PyObject* object) {
  auto* packer = static_cast<Packer*>(PyCapsule_GetPointer(self, kPackerCapsule));
  if (packer == nullptr) return nullptr;
  try {
    return packer->persistent_id(object).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
  return nullptr;
}

PyMethodDef persistent_id_method = {"persistent_id", call_persistent_id, METH_O,
                                    "Integer for what goes out of band, None for the rest."};

py::object persistent_id_function(const py::object& packer) {
  PyObject* capsule = PyCapsule_New(packer.cast<Packer*>(), kPackerCapsule, [](PyObject* self) {
    Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(self)));
  });
  if (capsule == nullptr) throw py::error_already_set();
  const auto owned = py::reinterpret_steal<py::object>(capsule);
  if (PyCapsule_SetContext(capsule, py::object(packer).release().ptr()) != 0) throw py::error_already_set();
  auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&persistent_id_method, capsule));
  if (!function) throw py::error_already_set();
  return function;
}

py::list build_from_capsule(const py::object& segment, const py::list& substitutes) {
  const auto* view = static_cast<const SegmentView*>(PyCapsule_GetPointer(segment.ptr(), kSegmentCapsule));
  if (view == nullptr) throw py::error_already_set();
  return build(*view, substitutes);
}

}  // namespace

PYBIND11_MODULE(_torch, module) {
  // Its converters and classes must be there before a tensor is met.
  py::module_::import("torch");
  module.doc() = "Tensors and storages over a mapping. Use overmind.skeleton instead.";
  module.attr("TORCH_VERSION") = OVERMIND_TORCH_VERSION;
  py::class_<Packer>(module, "Packer", py::is_final())
      .def(py::init<const py::dict&, py::object>(), py::arg("substitutes"), py::arg("inspector_of") = py::none())
      .def_property_readonly("persistent_id", &persistent_id_function)
      .def("finish", &Packer::finish);
  module.def("build", &build_from_capsule, py::arg("segment"), py::arg("substitutes"));
}

}  // namespace overmind
