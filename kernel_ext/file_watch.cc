// SPDX-License-Identifier: MIT
#include "kernel_ext/file_watch.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_ext/imported_functions.h"
#include "kernel_ext/random_watch.h"

// What code compiled with _FORTIFY_SOURCE calls; no header declares them.
extern "C" {
int __open_2(const char* path, int flags);
int __open64_2(const char* path, int flags);
int __openat_2(int folder, const char* path, int flags);
int __openat64_2(int folder, const char* path, int flags);
ssize_t __readlink_chk(const char* path, char* target, std::size_t size, std::size_t room);
ssize_t __readlinkat_chk(int folder, const char* path, char* target, std::size_t size, std::size_t room);
char* __realpath_chk(const char* path, char* resolved, std::size_t room);
}

namespace overmind {
namespace py = pybind11;
namespace {

struct Opened {
  const char* event;
  std::string path;
  std::string mode;
};

struct Recording {
  int depth = 1;
  py::list events;             // of the interpreter, on the recording's own thread
  std::vector<Opened> opened;  // of libc, on any; guarded by `mutex`
  std::vector<pid_t> older;    // threads that were there when it began
};

// Guards `recordings` and their `opened`.
std::mutex mutex;
std::vector<Recording*> recordings;
std::atomic<int> active{0};
std::atomic<pid_t> watched_process{0};
thread_local Recording* recording = nullptr;
thread_local bool inside = false;  // our own code opens files too

// ---- the interpreter's audit events ------------------------------------------------------------

constexpr std::array kListings = {"os.listdir", "os.scandir"};
constexpr std::array kProcesses = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec"};

template <typename Names>
bool is_one_of(const char* event, const Names& names) {
  return std::any_of(names.begin(), names.end(), [&](const char* name) { return std::strcmp(event, name) == 0; });
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

const char* mode_of(int flags) {
  const int access = flags & O_ACCMODE;
  return access == O_RDONLY ? "r" : access == O_WRONLY ? "w" : "r+";
}

// open() gives a mode, os.open() only flags.
py::object mode_of(const py::tuple& arguments) {
  if (arguments.size() < 2) return py::str("");
  if (PyUnicode_Check(py::object(arguments[1]).ptr())) return arguments[1];
  if (arguments.size() < 3 || !PyLong_Check(py::object(arguments[2]).ptr())) return py::str("");
  return py::str(mode_of(arguments[2].cast<int>()));
}

void record(const char* event, py::handle arguments) {
  if (is_one_of(event, kProcesses)) return recording->events.append(py::make_tuple("process", event, ""));
  const auto values = py::reinterpret_borrow<py::tuple>(arguments);
  if (values.empty()) return;
  const py::object path = absolute_path(values[0]);
  if (!path) return;
  recording->events.append(
      py::make_tuple(event, path, std::strcmp(event, "open") == 0 ? mode_of(values) : py::str("")));
}

bool wanted(const char* event) {
  return std::strcmp(event, "open") == 0 || is_one_of(event, kListings) || is_one_of(event, kProcesses);
}

// Python's own open() of a random device: it lets go of the GIL before it calls libc's.
void tell_of_device(const char* event, PyObject* arguments) {
  if (std::strcmp(event, "open") != 0 || !PyTuple_Check(arguments) || PyTuple_GET_SIZE(arguments) == 0) return;
  PyObject* path = PyTuple_GET_ITEM(arguments, 0);
  const char* name = PyUnicode_Check(path) ? PyUnicode_AsUTF8(path)
                     : PyBytes_Check(path) ? PyBytes_AS_STRING(path)
                                           : nullptr;
  if (name == nullptr) PyErr_Clear();
  if (is_random_device(name)) tell_of_draw(name);
}

int hook(const char* event, PyObject* arguments, void*) {
  if (active.load(std::memory_order_relaxed) == 0) return 0;
  if (!wanted(event)) return 0;
  tell_of_device(event, arguments);
  if (recording == nullptr) return 0;
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

// ---- libc's functions ---------------------------------------------------------------------------

// Kernel files are no dependencies; allocators and thread pools open them at times when nothing may be allocated.
bool is_of_interest(const char* path) {
  constexpr std::array kKernel = {"/proc/", "/sys/", "/dev/"};
  if (path != nullptr && std::strncmp(path, "/dev/shm/", 9) == 0) return true;
  return path != nullptr && *path != '\0' && std::none_of(kKernel.begin(), kKernel.end(), [&](const char* folder) {
           return std::strncmp(path, folder, std::strlen(folder)) == 0;
         });
}

std::string absolute(int folder, const char* path) {
  if (*path == '/') return path;
  char base[4096];
  if (folder == AT_FDCWD) {
    if (::getcwd(base, sizeof(base)) == nullptr) return path;
  } else {
    const std::string link = "/proc/self/fd/" + std::to_string(folder);
    const ssize_t size = ::readlink(link.c_str(), base, sizeof(base) - 1);
    if (size <= 0) return path;
    base[size] = '\0';
  }
  return std::string(base) + "/" + path;
}

bool is_write(const std::string& mode) { return mode.find_first_of("wax+") != std::string::npos; }

void note_locked(const char* event, const std::string& path, const std::string& mode) {
  const pid_t thread = ::gettid();
  for (Recording* one : recordings) {
    if (recording != nullptr && one != recording) continue;
    const bool own = one == recording || std::find(one->older.begin(), one->older.end(), thread) == one->older.end();
    if (own || !is_write(mode)) one->opened.push_back({event, path, mode});
  }
}

// Never fails and leaves errno alone.
void note(const char* event, int folder, const char* path, const char* mode) {
  if (!is_watching()) return;
  if (is_random_device(path) && PyGILState_Check() != 0) tell_of_draw(path);  // torch.Generator.seed()
  if (!is_of_interest(path)) return;
  const int error = errno;
  inside = true;
  try {
    const std::string whole = absolute(folder, path);
    const std::lock_guard lock(mutex);
    note_locked(event, whole, mode != nullptr ? mode : "");
  } catch (const std::exception&) {  // out of memory: the load itself is about to fail
  }
  inside = false;
  errno = error;
}

// The third argument of open() is there only with these flags.
mode_t permissions(int flags, std::va_list arguments) {
  return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? static_cast<mode_t>(va_arg(arguments, int)) : 0;
}

template <auto original>
int open_at_path(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = permissions(flags, arguments);
  va_end(arguments);
  note("open", AT_FDCWD, path, mode_of(flags));
  return original(path, flags, mode);
}

template <auto original>
int open_in_folder(int folder, const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = permissions(flags, arguments);
  va_end(arguments);
  note("open", folder, path, mode_of(flags));
  return original(folder, path, flags, mode);
}

template <auto original>
int open_checked(const char* path, int flags) {
  note("open", AT_FDCWD, path, mode_of(flags));
  return original(path, flags);
}

template <auto original>
int open_in_folder_checked(int folder, const char* path, int flags) {
  note("open", folder, path, mode_of(flags));
  return original(folder, path, flags);
}

template <auto original>
std::FILE* open_stream(const char* path, const char* mode) {
  note("open", AT_FDCWD, path, mode);
  return original(path, mode);
}

template <auto original>
std::FILE* reopen_stream(const char* path, const char* mode, std::FILE* stream) {
  note("open", AT_FDCWD, path, mode);
  return original(path, mode, stream);
}

// What a link says is as much of an answer as what a file holds.
template <auto original, typename... Room>
ssize_t read_link(const char* path, char* target, std::size_t size, Room... room) {
  note("link", AT_FDCWD, path, "");
  return original(path, target, size, room...);
}

template <auto original, typename... Room>
ssize_t read_link_in_folder(int folder, const char* path, char* target, std::size_t size, Room... room) {
  note("link", folder, path, "");
  return original(folder, path, target, size, room...);
}

template <auto original, typename... Room>
char* resolve_path(const char* path, char* resolved, Room... room) {
  note("link", AT_FDCWD, path, "");
  return original(path, resolved, room...);
}

DIR* open_folder(const char* path) {
  note("os.scandir", AT_FDCWD, path, "");
  return ::opendir(path);
}

void* find_symbol(void* library, const char* name);

std::vector<Replacement> make_replacements() {
  std::vector<Replacement> table = {
      Replacement{"open", address_of(&open_at_path<&::open>)},
      Replacement{"open64", address_of(&open_at_path<&::open64>)},
      Replacement{"openat", address_of(&open_in_folder<&::openat>)},
      Replacement{"openat64", address_of(&open_in_folder<&::openat64>)},
      Replacement{"__open_2", address_of(&open_checked<&::__open_2>)},
      Replacement{"__open64_2", address_of(&open_checked<&::__open64_2>)},
      Replacement{"__openat_2", address_of(&open_in_folder_checked<&::__openat_2>)},
      Replacement{"__openat64_2", address_of(&open_in_folder_checked<&::__openat64_2>)},
      Replacement{"fopen", address_of(&open_stream<&::fopen>)},
      Replacement{"fopen64", address_of(&open_stream<&::fopen64>)},
      Replacement{"freopen", address_of(&reopen_stream<&::freopen>)},
      Replacement{"freopen64", address_of(&reopen_stream<&::freopen64>)},
      Replacement{"opendir", address_of(&open_folder)},
      Replacement{"readlink", address_of(&read_link<&::readlink>)},
      Replacement{"__readlink_chk", address_of(&read_link<&::__readlink_chk, std::size_t>)},
      Replacement{"readlinkat", address_of(&read_link_in_folder<&::readlinkat>)},
      Replacement{"__readlinkat_chk", address_of(&read_link_in_folder<&::__readlinkat_chk, std::size_t>)},
      Replacement{"realpath", address_of(&resolve_path<&::realpath>)},
      Replacement{"__realpath_chk", address_of(&resolve_path<&::__realpath_chk, std::size_t>)},
      Replacement{"dlsym", address_of(&find_symbol), /*loaders=*/true},
  };
  const auto random = random_replacements();
  table.insert(table.end(), random.begin(), random.end());
  return table;
}

std::span<const Replacement> replacements() {
  static const std::vector<Replacement> table = make_replacements();
  return table;
}

// Python looks a module's first function up right after it loaded it: here what came with it is reached in time.
void* find_symbol(void* library, const char* name) {
  if (active.load(std::memory_order_relaxed) != 0) replace_imports(replacements());
  void* found = ::dlsym(library, name);
  // ctypes calls what it is given here, past all imports.
  for (const Replacement& one : replacements()) {
    if (one.function == address_of(&find_symbol)) continue;
    if (std::strcmp(one.name, name) == 0 && found == ::dlsym(RTLD_DEFAULT, name)) return one.function;
  }
  return found;
}

// ---- recordings ------------------------------------------------------------------------------------

// In a forked child only the thread that forked goes on, and its recording with it; the others' belong to nobody.
void keep_own_recording() {
  recordings.clear();
  if (recording != nullptr) recordings.push_back(recording);
  active.store(static_cast<int>(recordings.size()), std::memory_order_relaxed);
  watched_process.store(::getpid(), std::memory_order_relaxed);
  mutex.unlock();
}

void install_once() {
  static const bool installed = [] {
    if (PySys_AddAuditHook(hook, nullptr) != 0) throw py::error_already_set();
    ::pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, keep_own_recording);
    return true;
  }();
  static_cast<void>(installed);
}

// To open a folder is not to read it; SQLite does so to flush one, in the thread that keeps IPython's history.
bool is_opened_folder(const Opened& one) {
  struct stat now {};
  return std::strcmp(one.event, "open") == 0 && ::stat(one.path.c_str(), &now) == 0 && S_ISDIR(now.st_mode);
}

std::vector<pid_t> threads() {
  std::vector<pid_t> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/task"), &::closedir);
  while (const dirent* entry = folder != nullptr ? ::readdir(folder.get()) : nullptr) {
    if (const pid_t thread = std::atoi(entry->d_name); thread > 0) found.push_back(thread);
  }
  return found;
}

}  // namespace

void start_recording() {
  if (recording != nullptr) {
    ++recording->depth;
    return;
  }
  install_once();
  replace_imports(replacements());
  auto begun = std::make_unique<Recording>();
  begun->older = threads();
  const std::lock_guard lock(mutex);
  recordings.push_back(begun.get());
  recording = begun.release();
  watched_process.store(::getpid(), std::memory_order_relaxed);
  active.fetch_add(1, std::memory_order_relaxed);
}

py::list stop_recording() {
  if (recording == nullptr) throw std::logic_error("stop_recording() without start_recording()");
  if (--recording->depth > 0) return py::list();
  const std::unique_ptr<Recording> ended(recording);
  recording = nullptr;
  active.fetch_sub(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex);
    std::erase(recordings, ended.get());
  }
  for (const Opened& one : ended->opened) {
    if (is_opened_folder(one)) continue;
    const auto path = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(one.path.data(), static_cast<Py_ssize_t>(one.path.size())));
    if (!path) throw py::error_already_set();
    ended->events.append(py::make_tuple(one.event, path, one.mode));
  }
  return ended->events;
}

bool is_watching() {
  return active.load(std::memory_order_relaxed) != 0 && !inside &&
         ::getpid() == watched_process.load(std::memory_order_relaxed);
}

void stop_watching() {
  if (active.load(std::memory_order_relaxed) == 0) restore_imports();
}

}  // namespace overmind
