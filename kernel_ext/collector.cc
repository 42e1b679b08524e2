// SPDX-License-Identifier: MIT
#include "kernel_ext/collector.h"

namespace overmind {
namespace {

namespace py = pybind11;

// So many collections of the youngest generation before the next older one: never.
constexpr int kNever = 1 << 30;
// Fewer objects than this are left to the next collection of the youngest: it looks at them in half a millisecond.
constexpr long kWorthIt = 5'000;
// As many objects that went to the oldest generation unseen are looked at, with all others. Python itself does that
// when a quarter is new, and a process with torch and diffusers has a million.
constexpr long kMostUnseen = 400'000;

struct Gc {
  py::object get_threshold, set_threshold, get_count, freeze, unfreeze, get_freeze_count, collect;
};

// Never freed: other threads may be at work while the interpreter ends.
Gc* gc = nullptr;
long unseen = 0;

long count_of(int generation) { return py::tuple(gc->get_count())[generation].cast<long>(); }

// Puts `young` new objects, and whatever else is young, into the oldest generation without looking at them.
void age(long young) {
  if (young < kWorthIt) return;
  unseen += young;
  if (unseen > kMostUnseen) {
    unseen = 0;
    gc->collect();
    return;
  }
  gc->freeze();
  gc->unfreeze();
}

class CollectorOff {
 public:
  explicit CollectorOff(bool may_age) : may_age_(may_age) {}
  void enter() { was_on_ = PyGC_Disable() != 0; }
  void exit(const py::args&) {
    if (!was_on_) return;
    was_on_ = false;
    const long young = may_age_ ? count_of(0) : 0;
    PyGC_Enable();
    age(young);
  }

 private:
  const bool may_age_;
  bool was_on_ = false;
};

// What loads that go on at a time share.
class YoungOnly {
 public:
  void enter() {
    if (inside_ == 0) put_back();  // another thread may have read the thresholds in a load, and set them after it
    if (inside_++ > 0 || PyGC_IsEnabled() == 0) return;
    found_ = gc->get_threshold();
    gc->set_threshold(found_[py::int_(0)], kNever, found_[py::int_(2)]);
  }

  void exit(const py::args&) {
    if (inside_ == 0 || --inside_ > 0) return;
    put_back();
  }

  // The loads of other threads do not go on in a fork; one of its own may, without this.
  void in_child() {
    inside_ = 0;
    put_back();
  }

 private:
  void put_back() {
    // Else there was no load with the collector on, or somebody has set other ones.
    if (!found_ || py::tuple(gc->get_threshold())[1].cast<long>() != kNever) return;
    const long young = count_of(0) + count_of(1) * found_[py::int_(0)].cast<long>();
    gc->set_threshold(*found_);
    if (gc->get_freeze_count().cast<long>() == 0) age(young);
  }

  int inside_ = 0;
  py::object found_;
};

}  // namespace

void add_collector(py::module_& module) {
  const py::module_ found = py::module_::import("gc");
  gc =
      new Gc{found.attr("get_threshold"), found.attr("set_threshold"),    found.attr("get_count"), found.attr("freeze"),
             found.attr("unfreeze"),      found.attr("get_freeze_count"), found.attr("collect")};
  py::class_<CollectorOff>(module, "CollectorOff")
      .def(py::init<bool>())
      .def("__enter__", &CollectorOff::enter)
      .def("__exit__", &CollectorOff::exit);
  py::class_<YoungOnly>(module, "YoungOnly")
      .def(py::init<>())
      .def("__enter__", &YoungOnly::enter)
      .def("__exit__", &YoungOnly::exit)
      .def("in_child", &YoungOnly::in_child);
}

}  // namespace overmind
