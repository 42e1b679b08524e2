// SPDX-License-Identifier: MIT
#include "kernel_ext/builder.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernel_ext/tensor_records.h"

namespace overmind {
namespace {

[[noreturn]] void malformed(const char* what) {
  throw std::invalid_argument(std::string("the tensor records of this entry are malformed: ") + what +
                              "; drop the entry");
}

// Reads what was packed without alignment; throws instead of reading past the end.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, take_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> take_bytes(std::size_t size) {
    if (bytes_.size() < size) malformed("they end too early");
    const auto head = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return head;
  }
  std::size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

c10::Storage make_storage(const SegmentView& view, const StorageRecord& record, std::uint64_t& next_buffer) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  c10::DataPtr data;
  if (record.nbytes == 0) {
    data = allocator->allocate(0);
  } else {
    if (next_buffer >= view.buffer_count) malformed("more storages than buffers");
    const BufferView& buffer = view.buffers[next_buffer++];
    if (buffer.size != record.nbytes) malformed("a storage and its buffer differ in size");
    view.retain(view.owner);
    data = c10::DataPtr(buffer.data, view.owner, view.release, c10::Device(c10::kCPU));
  }
  const bool resizable = record.resizable != 0;
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(record.nbytes)), std::move(data),
      resizable ? allocator : nullptr, resizable));
}

c10::ScalarType scalar_type(const ItemRecord& record) {
  if (record.dtype >= static_cast<std::uint8_t>(c10::ScalarType::Undefined)) malformed("unknown dtype");
  return static_cast<c10::ScalarType>(record.dtype);
}

py::object make_tensor(const ItemRecord& record, const c10::Storage& storage, Reader& reader) {
  std::array<int64_t, 2 * 255> shape;
  const std::size_t ndim = record.ndim;
  std::memcpy(shape.data(), reader.take_bytes(2 * ndim * sizeof(int64_t)).data(), 2 * ndim * sizeof(int64_t));
  const c10::IntArrayRef sizes(shape.data(), ndim);
  const c10::IntArrayRef strides(shape.data() + ndim, ndim);
  const auto type = c10::scalarTypeToTypeMeta(scalar_type(record));
  if (!tensor_fits(record.offset, type.itemsize(), storage.nbytes(), sizes, strides))
    malformed("a tensor leaves its storage");
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), type);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides, record.offset);
  if ((record.flags & kRequiresGrad) != 0) impl->set_requires_grad(true);
  auto* python_type =
      reinterpret_cast<PyTypeObject*>(record.kind == ItemKind::kParameter ? ParameterClass : THPVariableClass);
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor, python_type));
  if (!object) throw py::error_already_set();
  return object;
}

py::object make_storage_object(const ItemRecord& record, const c10::Storage& storage) {
  auto untyped = py::reinterpret_steal<py::object>(THPStorage_Wrap(storage));
  if (!untyped) throw py::error_already_set();
  if (record.kind == ItemKind::kUntypedStorage) return untyped;
  const py::handle dtype(reinterpret_cast<PyObject*>(torch::getTHPDtype(scalar_type(record))));
  using namespace pybind11::literals;
  return py::module_::import("torch.storage")
      .attr("TypedStorage")("wrap_storage"_a = untyped, "dtype"_a = dtype, "_internal"_a = true);
}

py::object make_item(const ItemRecord& record, const std::vector<c10::Storage>& storages, const py::list& substitutes,
                     Reader& reader) {
  if (record.kind == ItemKind::kSubstitute) {
    if (record.index >= substitutes.size()) malformed("unknown substitute");
    return substitutes[record.index];
  }
  if (record.kind > ItemKind::kSubstitute) malformed("unknown kind of item");
  if (record.index >= storages.size()) malformed("unknown storage");
  if (record.kind == ItemKind::kTensor || record.kind == ItemKind::kParameter)
    return make_tensor(record, storages[record.index], reader);
  return make_storage_object(record, storages[record.index]);
}

void set_attributes(const py::list& items, std::span<const std::byte> pickled) {
  const py::bytes bytes(reinterpret_cast<const char*>(pickled.data()), pickled.size());
  const py::list all = py::module_::import("pickle").attr("loads")(bytes);
  for (const py::handle pair : all) {
    const auto [index, values] = pair.cast<std::pair<std::size_t, py::dict>>();
    if (index >= items.size()) malformed("attributes of an unknown item");
    const auto target =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(PyList_GET_ITEM(items.ptr(), index), nullptr));
    // Straight into __dict__, where they were: a property of the same name must not be called.
    if (!target || PyDict_Update(target.ptr(), values.ptr()) != 0) throw py::error_already_set();
  }
}

}  // namespace

py::list build(const SegmentView& view, const py::list& substitutes) {
  const c10::InferenceMode off(false);
  Reader reader({view.data + view.tensors.offset, view.tensors.size});
  const auto header = reader.take<RecordsHeader>();
  if (header.magic != kRecordsMagic) malformed("not such records");
  if (header.storage_count > reader.left() / sizeof(StorageRecord)) malformed("they end too early");
  std::vector<c10::Storage> storages;
  storages.reserve(header.storage_count);
  std::uint64_t next_buffer = 0;
  for (std::uint32_t i = 0; i < header.storage_count; ++i)
    storages.push_back(make_storage(view, reader.take<StorageRecord>(), next_buffer));
  if (header.item_count > reader.left() / sizeof(ItemRecord)) malformed("they end too early");
  py::list items(header.item_count);
  for (std::uint32_t i = 0; i < header.item_count; ++i) {
    py::object item = make_item(reader.take<ItemRecord>(), storages, substitutes, reader);
    PyList_SET_ITEM(items.ptr(), i, item.release().ptr());
  }
  if (header.attributes_size > 0) set_attributes(items, reader.take_bytes(header.attributes_size));
  return items;
}

}  // namespace overmind
