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

// What a memoryview of an entry is a view of.
struct View {
  std::shared_ptr<Segment::Memory> memory;
  std::span<std::byte> bytes;
  bool readonly;
};

// Counted outside Python, because a storage is freed on any thread.
struct Owner {
  std::atomic<std::uint64_t> count{1};
  std::shared_ptr<Segment::Memory> memory;
  SegmentView view{};
};

namespace {

py::buffer_info view_info(const View& view) {
  return {view.bytes.data(),
          1,
          py::format_descriptor<std::uint8_t>::format(),
          1,
          {static_cast<py::ssize_t>(view.bytes.size())},
          {1},
          view.readonly};
}

void retain(void* owner) { static_cast<Owner*>(owner)->count.fetch_add(1, std::memory_order_relaxed); }

void release(void* owner) {
  if (static_cast<Owner*>(owner)->count.fetch_sub(1, std::memory_order_acq_rel) == 1) delete static_cast<Owner*>(owner);
}

Segment make_segment(const std::string& loader, const std::string& target, const py::bytes& meta,
                     const py::bytes& skeleton, const py::bytes& tensors, const py::sequence& buffers) {
  const std::vector<Source> sources = to_sources(buffers);
  Manifest draft;
  draft.id = 1;
  draft.loader = loader;
  draft.target = target;
  draft.created_ns = static_cast<std::uint64_t>(std::time(nullptr)) * 1'000'000'000u;
  const SegmentPlan plan =
      value_or_raise(plan_segment_of(draft, as_bytes(meta), as_bytes(skeleton), as_bytes(tensors), sources));
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

// [(index, st_dev, st_ino, offset)]
py::list find_borrowable_buffers(const py::sequence& buffers, std::uint64_t min_size) {
  const std::vector<Source> sources = to_sources(buffers);
  std::vector<Borrowable> found;
  {
    const py::gil_scoped_release unlocked;
    found = find_borrowable(sources, min_size);
  }
  py::list places;
  for (const Borrowable& place : found) places.append(py::make_tuple(place.index, place.dev, place.ino, place.offset));
  return places;
}

// [(st_dev, st_ino)]
py::list mapped_for_writing() {
  py::list places;
  for (const FilePlace& place : files_mapped_for_writing()) places.append(py::make_tuple(place.dev, place.ino));
  return places;
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

Segment::Segment(std::shared_ptr<Mapping> mapping) : memory_(std::make_shared<Memory>()) {
  memory_->mapping = std::move(mapping);
  for (const Range range : manifest().buffers)
    memory_->buffers.push_back({memory_->mapping->data() + range.offset, range.size});
}

void Segment::attach(const py::sequence& files, const py::sequence& borrowed) {
  using Identity = std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;
  using Place = std::tuple<std::size_t, std::size_t, std::uint64_t, std::uint64_t>;
  for (const py::handle file : files) {
    auto [path, dev, ino, size, mtime_ns, ctime_ns] = file.cast<Identity>();
    memory_->files.push_back(value_or_raise(BorrowedFile::map({std::move(path), dev, ino, size, mtime_ns, ctime_ns})));
  }
  for (const py::handle place : borrowed) {
    const auto [buffer, file, offset, nbytes] = place.cast<Place>();
    if (buffer >= memory_->buffers.size() || file >= memory_->files.size())
      throw py::index_error("no such buffer or file");
    const std::span<std::byte> bytes = memory_->files[file]->bytes();
    if (offset > bytes.size() || nbytes > bytes.size() - offset)
      throw py::index_error("a borrowed buffer leaves its file");
    memory_->buffers[buffer] = {bytes.data() + offset, nbytes};
  }
}

py::object Segment::view(Range range, bool readonly) const { return view(memory_->mapping->bytes(range), readonly); }

py::object Segment::view(std::span<std::byte> bytes, bool readonly) const {
  const py::object exporter = py::cast(View{memory_, bytes, readonly});
  auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(exporter.ptr()));
  if (!view) throw py::error_already_set();
  return view;
}

py::bytes Segment::meta() const {
  const auto bytes = memory_->mapping->bytes(manifest().meta);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

py::object Segment::buffer(py::ssize_t index) const {
  const auto& buffers = memory_->buffers;
  if (index < 0 || static_cast<std::size_t>(index) >= buffers.size())
    throw py::index_error("buffer " + std::to_string(index) + " of " + std::to_string(buffers.size()));
  const BufferView& buffer = buffers[static_cast<std::size_t>(index)];
  return view(std::span(buffer.data, buffer.size), false);
}

py::object Segment::capsule() const {
  auto owner = std::make_unique<Owner>();
  owner->memory = memory_;
  const Mapping& mapping = *memory_->mapping;
  owner->view = {
      mapping.data(), mapping.size(), manifest().tensors, memory_->buffers.data(), memory_->buffers.size(), owner.get(),
      &retain,        &release};
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
      .def("attach", &Segment::attach, py::arg("files"), py::arg("borrowed"))
      .def("buffer", &Segment::buffer, py::arg("index"))
      .def("capsule", &Segment::capsule);
  module.def("files_mapped_for_writing", &mapped_for_writing);
  module.def("find_borrowable", &find_borrowable_buffers, py::arg("buffers"), py::arg("min_size"));
  module.def("buffer_address", &buffer_address, py::arg("buffer"));
  module.def("make_segment", &make_segment, py::kw_only(), py::arg("loader"), py::arg("target"), py::arg("meta"),
             py::arg("skeleton"), py::arg("tensors"), py::arg("buffers"));
}

}  // namespace overmind
