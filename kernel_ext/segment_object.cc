// SPDX-License-Identifier: MIT
#include "kernel_ext/segment_object.h"

#include <unistd.h>

#include <atomic>
#include <ctime>
#include <vector>

#include "kernel_ext/bytes.h"
#include "kernel_ext/errors.h"
#include "kernel_ext/segment_capsule.h"

namespace overmind {
namespace py = pybind11;
namespace {

// What a memoryview of the mapping is a view of.
struct View {
  std::shared_ptr<Mapping> mapping;
  std::span<std::byte> bytes;
  bool readonly;
};

py::buffer_info view_info(const View& view) {
  return {view.bytes.data(),
          1,
          py::format_descriptor<std::uint8_t>::format(),
          1,
          {static_cast<py::ssize_t>(view.bytes.size())},
          {1},
          view.readonly};
}

// Counted outside Python, because a storage is freed on any thread.
struct Owner {
  std::atomic<std::uint64_t> count{1};
  std::shared_ptr<Mapping> mapping;
  SegmentView view{};
};

void retain(void* owner) { static_cast<Owner*>(owner)->count.fetch_add(1, std::memory_order_relaxed); }

void release(void* owner) {
  if (static_cast<Owner*>(owner)->count.fetch_sub(1, std::memory_order_acq_rel) == 1) delete static_cast<Owner*>(owner);
}

Segment make_segment(const std::string& loader, const std::string& target, const py::bytes& meta,
                     const py::bytes& skeleton, const py::bytes& tensors, const py::sequence& buffers) {
  const std::vector<Source> sources = to_sources(buffers);
  std::vector<std::uint64_t> sizes;
  for (const Source& source : sources) sizes.push_back(source.size);
  Manifest draft;
  draft.id = 1;
  draft.loader = loader;
  draft.target = target;
  draft.created_ns = static_cast<std::uint64_t>(std::time(nullptr)) * 1'000'000'000u;
  const SegmentPlan plan =
      value_or_raise(plan_segment(draft, as_bytes(meta), as_bytes(skeleton), as_bytes(tensors), sizes));
  const UniqueFd fd = value_or_raise(create_segment("overmind-local", plan.total_size));
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = write_segment(fd.get(), plan, sources);
    if (status.ok()) status = seal_segment(fd.get());
  }
  check(status);
  return Segment(value_or_raise(Mapping::map(fd.get())));
}

// (address, nbytes, read-only) of a contiguous buffer.
py::tuple buffer_address(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  py::ssize_t expected = info.itemsize;
  for (py::ssize_t i = info.ndim; i-- > 0; expected *= info.shape[static_cast<std::size_t>(i)])
    if (info.strides[static_cast<std::size_t>(i)] != expected) throw py::buffer_error("not contiguous");
  return py::make_tuple(reinterpret_cast<std::uintptr_t>(info.ptr), info.size * info.itemsize, info.readonly);
}

}  // namespace

std::shared_ptr<Mapping> tell_when_unmapped(std::shared_ptr<Client> client, std::shared_ptr<Mapping> mapping) {
  Mapping* bare = mapping.get();
  return {bare, [client = std::move(client), mapping = std::move(mapping), pid = ::getpid()](Mapping*) mutable {
            const EntryId id = mapping->manifest().id;
            mapping.reset();
            if (::getpid() == pid) client->unmapped(id);
          }};
}

py::object Segment::view(Range range, bool readonly) const {
  const py::object exporter = py::cast(View{mapping_, mapping_->bytes(range), readonly});
  auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(exporter.ptr()));
  if (!view) throw py::error_already_set();
  return view;
}

py::bytes Segment::meta() const {
  const auto bytes = mapping_->bytes(manifest().meta);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

py::object Segment::buffer(py::ssize_t index) const {
  const auto& buffers = manifest().buffers;
  if (index < 0 || static_cast<std::size_t>(index) >= buffers.size())
    throw py::index_error("buffer " + std::to_string(index) + " of " + std::to_string(buffers.size()));
  return view(buffers[static_cast<std::size_t>(index)], false);
}

py::object Segment::capsule() const {
  auto owner = std::make_unique<Owner>();
  owner->mapping = mapping_;
  const Manifest& manifest = mapping_->manifest();
  owner->view = {mapping_->data(),        mapping_->size(), manifest.tensors, manifest.buffers.data(),
                 manifest.buffers.size(), owner.get(),      &retain,          &release};
  PyObject* capsule = PyCapsule_New(&owner->view, kSegmentCapsule, [](PyObject* self) {
    const auto* view = static_cast<const SegmentView*>(PyCapsule_GetPointer(self, kSegmentCapsule));
    view->release(view->owner);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(owner.release());  // the capsule's now
  return py::reinterpret_steal<py::object>(capsule);
}

void add_segment(py::module_& module) {
  py::class_<View>(module, "_View", py::buffer_protocol()).def_buffer(&view_info);
  py::class_<Segment>(module, "Segment", py::is_final())
      .def_property_readonly("entry_id", [](const Segment& self) { return entry_id_to_string(self.manifest().id); })
      .def_property_readonly("loader", [](const Segment& self) { return self.manifest().loader; })
      .def_property_readonly("target", [](const Segment& self) { return self.manifest().target; })
      .def_property_readonly("nbytes", [](const Segment& self) { return self.manifest().total_size; })
      .def_property_readonly("native_seconds",
                             [](const Segment& self) { return static_cast<double>(self.manifest().native_ns) / 1e9; })
      .def_property_readonly("created",
                             [](const Segment& self) { return static_cast<double>(self.manifest().created_ns) / 1e9; })
      .def_property_readonly("meta", &Segment::meta)
      .def_property_readonly("skeleton", [](const Segment& self) { return self.view(self.manifest().skeleton, true); })
      .def_property_readonly("tensors", [](const Segment& self) { return self.view(self.manifest().tensors, true); })
      .def_property_readonly("buffer_count", [](const Segment& self) { return self.manifest().buffers.size(); })
      .def("buffer", &Segment::buffer, py::arg("index"))
      .def("capsule", &Segment::capsule);
  module.def("buffer_address", &buffer_address, py::arg("buffer"));
  module.def("make_segment", &make_segment, py::kw_only(), py::arg("loader"), py::arg("target"), py::arg("meta"),
             py::arg("skeleton"), py::arg("tensors"), py::arg("buffers"));
}

}  // namespace overmind
