// SPDX-License-Identifier: MIT
#include "kernel_ext/audit.h"

#include <fcntl.h>

#include <atomic>
#include <cstring>
#include <memory>

namespace overmind {
namespace py = pybind11;
namespace {

struct Recording {
  int depth = 1;
  py::list events;
};

std::atomic<int> active{0};
thread_local Recording* recording = nullptr;

bool wanted(const char* event) {
  return std::strcmp(event, "open") == 0 || std::strcmp(event, "os.listdir") == 0 ||
         std::strcmp(event, "os.scandir") == 0;
}

// Null without an error: nothing to record (a descriptor).
py::object absolute_path(py::handle path) {
  if (path.is_none()) return py::module_::import("os").attr("getcwd")();
  if (PyLong_Check(path.ptr())) return py::object();
  // Not os.path.abspath: folding ".." away would name another file behind a symlink.
  const py::module_ os = py::module_::import("os");
  const py::object text = os.attr("fsdecode")(path);
  if (os.attr("path").attr("isabs")(text).cast<bool>()) return text;
  return os.attr("path").attr("join")(os.attr("getcwd")(), text);
}

// open() gives a mode, os.open() only flags.
py::object mode_of(const py::tuple& arguments) {
  if (arguments.size() < 2) return py::str("");
  if (PyUnicode_Check(py::object(arguments[1]).ptr())) return arguments[1];
  if (arguments.size() < 3 || !PyLong_Check(py::object(arguments[2]).ptr())) return py::str("");
  const int access = arguments[2].cast<int>() & O_ACCMODE;
  return py::str(access == O_RDONLY ? "r" : access == O_WRONLY ? "w" : "r+");
}

void record(const char* event, py::handle arguments) {
  const auto values = py::reinterpret_borrow<py::tuple>(arguments);
  if (values.empty()) return;
  const py::object path = absolute_path(values[0]);
  if (!path) return;
  recording->events.append(
      py::make_tuple(event, path, std::strcmp(event, "open") == 0 ? mode_of(values) : py::str("")));
}

int hook(const char* event, PyObject* arguments, void*) {
  if (active.load(std::memory_order_relaxed) == 0) return 0;
  if (recording == nullptr || !wanted(event)) return 0;
  // An audit hook that raises makes the user's open() fail; what can't be recorded shows as a missing dependency
  // only for paths that open() refuses too.
  try {
    const py::error_scope keep;
    record(event, arguments);
  } catch (const std::exception&) {
    PyErr_Clear();
  }
  return 0;
}

void install_once() {
  static const bool installed = [] {
    if (PySys_AddAuditHook(hook, nullptr) != 0) throw py::error_already_set();
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace

void start_recording() {
  if (recording != nullptr) {
    ++recording->depth;
    return;
  }
  install_once();
  recording = new Recording;
  active.fetch_add(1, std::memory_order_relaxed);
}

py::list stop_recording() {
  if (recording == nullptr) throw std::logic_error("stop_recording() without start_recording()");
  if (--recording->depth > 0) return py::list();
  const std::unique_ptr<Recording> ended(recording);
  recording = nullptr;
  active.fetch_sub(1, std::memory_order_relaxed);
  return ended->events;
}

}  // namespace overmind
