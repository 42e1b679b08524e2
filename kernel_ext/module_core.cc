// SPDX-License-Identifier: MIT
// overmind._core: the store as Python sees it. Types and contracts in _core.pyi. Links neither torch nor numpy.
#include <pybind11/pybind11.h>

#include "kernel_ext/bytes.h"
#include "kernel_ext/client_bindings.h"
#include "kernel_ext/collector.h"
#include "kernel_ext/containers.h"
#include "kernel_ext/errors.h"
#include "kernel_ext/file_watch.h"
#include "kernel_ext/main_program.h"
#include "kernel_ext/namespaces.h"
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

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The store: client of overmindd, segments, watching what a load opens.";
  module.attr("__version__") = OVERMIND_VERSION;
  add_errors(module);
  add_config(module);
  add_segment(module);
  add_client(module);
  add_collector(module);
  add_containers(module);
  add_main_program(module);
  add_namespaces(module);
  module.def("pickle_globals", &globals_of, py::arg("pickle"));
  module.def("start_recording", &start_recording);
  module.def("stop_recording", &stop_recording);
  module.def("stop_watching", &stop_watching);
}

}  // namespace overmind
