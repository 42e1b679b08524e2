// SPDX-License-Identifier: MIT
// How it works: the forked process sets sys.excepthook to one of these and raises. The exception leaves all
// Python frames, the interpreter's C code calls the hook, and from there everything is as if it had been asked to run
// the program itself: PyRun_AnyFileExFlags() is what `python script.py` calls.
#include "kernel_ext/main_program.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/config.h"

namespace overmind {
namespace py = pybind11;
namespace {

// What the interpreter noted about the exception that brought us here, and the hook that we are.
void forget_exception(const py::object& hook) {
  PySys_SetObject("excepthook", hook.ptr());
  for (const char* name : {"last_exc", "last_type", "last_value", "last_traceback"})
    if (PySys_GetObject(name) != nullptr && PySys_SetObject(name, nullptr) != 0) PyErr_Clear();
}

void run_file(const std::string& path, const py::object& hook, const py::args&) {
  forget_exception(hook);
  std::FILE* file = std::fopen(path.c_str(), "rbe");
  if (file == nullptr) {
    std::fprintf(stderr, "can't open file '%s'\n", path.c_str());
    Py_Exit(2);
  }
  PyCompilerFlags flags = _PyCompilerFlags_INIT;
  // Returning makes the interpreter end with 1, or by SIGINT after a KeyboardInterrupt, as it does for any program.
  if (PyRun_AnyFileExFlags(file, path.c_str(), 1, &flags) == 0) Py_Exit(0);
}

void run_call(const py::object& function, const py::object& hook, const py::args&) {
  forget_exception(hook);
  PyObject* result = PyObject_CallNoArgs(function.ptr());
  if (result != nullptr) Py_Exit(0);
  const bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0;
  PyErr_Print();  // exits here if it is SystemExit
  if (!interrupted) return;
  Py_FinalizeEx();
  ::signal(SIGINT, SIG_DFL);
  ::raise(SIGINT);
}

struct Reporter {
  int fd = -1;
  pid_t pid = 0;
  ino_t socket = 0;   // the program may have closed the descriptor and opened another
  bool last = false;  // what comes after us has nothing to say
};
Reporter reporter;

void report(int code, void*) {
  struct stat info {};
  if (reporter.pid != ::getpid()) return;
  if (::fstat(reporter.fd, &info) == 0 && info.st_ino == reporter.socket) {
    char text[32];
    const int size = std::snprintf(text, sizeof(text), "exit %d", code);
    ::send(reporter.fd, text, static_cast<std::size_t>(size), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  if (!reporter.last) return;
  std::fflush(nullptr);
  ::_exit(code);
}

// Handlers run in the reverse order of their registration: those of libraries that the program itself loaded come
// before ours, those of libraries that it was forked with after it.
void report_exit(int fd, bool last) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) throw py::value_error("not a descriptor");
  reporter = {fd, ::getpid(), info.st_ino, last};
  ::on_exit(&report, nullptr);
}

}  // namespace

void add_main_program(py::module_& module) {
  module.def("run_file", &run_file);
  module.def("run_call", &run_call);
  module.def("report_exit", &report_exit);
  module.def("keep_forever", [](const py::object& object) { object.inc_ref(); });
  module.def("available_memory", [] { return available_memory(); });
}

}  // namespace overmind
