// SPDX-License-Identifier: MIT
#include "kernel_ext/random_watch.h"

#include <pybind11/pybind11.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstring>

#include "kernel_ext/file_watch.h"

namespace overmind {
namespace py = pybind11;
namespace {

ssize_t draw_bytes(void* target, std::size_t size, unsigned flags) {
  tell_of_draw("getrandom");
  return ::getrandom(target, size, flags);
}

int draw_entropy(void* target, std::size_t size) {
  tell_of_draw("getentropy");
  return ::getentropy(target, size);
}

// os.getrandom() draws like this, and os.urandom() of an interpreter that was built for an older libc.
long call_system(long number, ...) {
  std::array<long, 6> values{};
  std::va_list arguments;
  va_start(arguments, number);
  for (long& value : values) value = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_getrandom) tell_of_draw("getrandom");
  return ::syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

int raise_now(void* error) {
  const auto value = py::reinterpret_steal<py::object>(static_cast<PyObject*>(error));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  return -1;
}

// A function of libc can raise nothing, so what a signal's handler raised meanwhile comes when Python looks next.
void raise_later(const py::error_already_set& error) {
  PyObject* value = py::object(error.value()).release().ptr();
  if (Py_AddPendingCall(&raise_now, value) != 0) Py_DECREF(value);
}

void call_note_draw(const char* source) {
  const py::error_scope keep;
  try {
    const auto name = py::reinterpret_steal<py::object>(PyUnicode_FromString("overmind.recording"));
    const auto module = py::reinterpret_steal<py::object>(PyImport_GetModule(name.ptr()));
    if (module) module.attr("note_draw")(source);
  } catch (const py::error_already_set& error) {
    raise_later(error);
  } catch (const std::exception&) {  // out of memory: the load itself is about to fail
    PyErr_Clear();
  }
}

}  // namespace

std::span<const Replacement> random_replacements() {
  static const std::array table = {
      Replacement{"getrandom", address_of(&draw_bytes), /*loaders=*/true},
      Replacement{"getentropy", address_of(&draw_entropy), /*loaders=*/true},
      Replacement{"syscall", address_of(&call_system), /*loaders=*/true},
  };
  return table;
}

bool is_random_device(const char* path) {
  return path != nullptr && (std::strcmp(path, "/dev/urandom") == 0 || std::strcmp(path, "/dev/random") == 0);
}

void tell_of_draw(const char* source) {
  thread_local bool telling = false;
  if (telling || !is_watching() || PyGILState_GetThisThreadState() == nullptr) return;
  const int error = errno;
  telling = true;
  const PyGILState_STATE state = PyGILState_Ensure();
  call_note_draw(source);
  PyGILState_Release(state);
  telling = false;
  errno = error;
}

}  // namespace overmind
