// SPDX-License-Identifier: MIT
// How it works: the forked process sets sys.excepthook to one of these and raises. The exception leaves all
// Python frames, the interpreter's C code calls the hook, and from there everything is as if it had been asked to run
// the program itself: PyRun_AnyFileExFlags() is what `python script.py` calls.
#include "kernel_ext/main_program.h"

#include <link.h>
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

constexpr char kEndCapsule[] = "overmind.end_early";

struct Libraries {
  unsigned long long loaded = 0;
  unsigned long long with_destructors = 0;  // that the linker calls after all handlers of exit()
  bool operator==(const Libraries&) const = default;
};

// Of gcc's own there is one in every library.
bool has_destructors(const dl_phdr_info& info) {
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    if (info.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry)
      if (entry->d_tag == DT_FINI_ARRAYSZ) return entry->d_un.d_val > sizeof(void*);
  }
  return false;
}

Libraries libraries() {
  Libraries found;
  const auto visit = [](dl_phdr_info* info, std::size_t, void* data) {
    auto& counted = *static_cast<Libraries*>(data);
    counted.loaded = info->dlpi_adds - info->dlpi_subs;
    counted.with_destructors += has_destructors(*info) ? 1 : 0;
    return 0;
  };
  ::dl_iterate_phdr(visit, &found);
  return found;
}

struct Reporter {
  int fd = -1;
  pid_t pid = 0;
  ino_t socket = 0;           // the program may have closed the descriptor and opened another
  bool last = false;          // what comes after us has nothing to say
  bool kernel_ended = false;  // as it should: with 0
  Libraries before;           // that were there when it began
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
  if (!reporter.last || libraries().with_destructors != reporter.before.with_destructors) return;
  std::fflush(nullptr);
  ::_exit(code);
}

// The interpreter has taken all modules apart, and clears itself: strings, types. That runs nobody's code, and copies
// pages that are shared with the zygote, for 27 of the 100 ms in which a kernel ends; whoever restarts it looks after
// 100 ms for the first time. A library that the program itself loaded may have a handler of its own to be called.
void end_early(PyObject*) {
  if (reporter.kernel_ended && reporter.last && libraries() == reporter.before) report(0, nullptr);
}

// SystemExit with no code, or 0: what sys.exit() raises where all is well.
bool is_success() {
  if (PyErr_ExceptionMatches(PyExc_SystemExit) == 0) return false;
  const py::error_scope raised;
  const auto exception = py::reinterpret_borrow<py::object>(raised.value);
  const py::object code = PyExceptionInstance_Check(raised.value) ? exception.attr("code") : exception;
  return code.is_none() || (PyLong_CheckExact(code.ptr()) && code.equal(py::int_(0)));
}

void run_function(const py::object& function, const py::object& hook, bool is_kernel) {
  forget_exception(hook);
  PyObject* result = PyObject_CallNoArgs(function.ptr());
  reporter.kernel_ended = is_kernel && (result != nullptr || is_success());
  if (result != nullptr) Py_Exit(0);
  const bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0;
  PyErr_Print();  // exits here if it is SystemExit
  if (!interrupted) return;
  Py_FinalizeEx();
  ::signal(SIGINT, SIG_DFL);
  ::raise(SIGINT);
}

void run_call(const py::object& function, const py::object& hook, const py::args&) {
  run_function(function, hook, false);
}

void run_kernel(const py::object& function, const py::object& hook, const py::args&) {
  run_function(function, hook, true);
}

// Handlers run in the reverse order of their registration: those of libraries that the program itself loaded come
// before ours, those of libraries that it was forked with after it.
void report_exit(int fd, bool last) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) throw py::value_error("not a descriptor");
  reporter = {fd, ::getpid(), info.st_ino, last, false, libraries()};
  ::on_exit(&report, nullptr);
  const auto own = py::reinterpret_borrow<py::dict>(PyInterpreterState_GetDict(PyInterpreterState_Get()));
  own[kEndCapsule] = py::capsule(&reporter, kEndCapsule, end_early);
}

}  // namespace

void add_main_program(py::module_& module) {
  module.def("run_file", &run_file);
  module.def("run_call", &run_call);
  module.def("run_kernel", &run_kernel);
  module.def("report_exit", &report_exit);
  module.def("keep_forever", [](const py::object& object) { object.inc_ref(); });
  module.def("available_memory", [] { return available_memory(); });
}

}  // namespace overmind
