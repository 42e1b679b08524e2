// SPDX-License-Identifier: MIT
#include "kernel_ext/packer.h"

#include <ATen/Context.h>
#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/variable.h>

#include <stdexcept>

namespace overmind {
namespace {

[[noreturn]] void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

std::string describe(const at::Tensor& tensor) {
  std::string text = "a tensor of shape (";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + ")";
}

bool filled(PyObject* hooks) {
  if (hooks == nullptr || hooks == Py_None) return false;
  const int truth = PyObject_IsTrue(hooks);
  if (truth < 0) throw py::error_already_set();
  return truth == 1;
}

// What neither the fast path nor plain pickle gives back. Pickle keeps quiet about most of it.
void refuse_lost_state(PyObject* object, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse("an undefined tensor");
  if (tensor.is_inference()) refuse("a tensor made in inference mode");
  const auto* holder = reinterpret_cast<THPVariable*>(object);
  if (filled(holder->backward_hooks) || filled(holder->post_accumulate_grad_hooks))
    refuse(describe(tensor) + " has hooks, which pickle drops");
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) return;
  // Unpickled tensors have an empty dict of Python hooks, which stands in the list of C++ hooks.
  const std::size_t empty_ones = holder->backward_hooks == nullptr ? 0 : 1;
  if (torch::autograd::impl::hooks(tensor).size() > empty_ones)
    refuse(describe(tensor) + " has hooks, which pickle drops");
  if (tensor.grad_fn()) refuse(describe(tensor) + " is the result of a computation that autograd recorded");
  if (meta->grad_.defined()) refuse(describe(tensor) + " has a gradient");
  if (meta->fw_grad_) refuse(describe(tensor) + " has a forward gradient");
}

// Dense, on the CPU, an ordinary autograd leaf: everything else (sparse, quantised, conj, neg, nested,
// meta, functorch, mkldnn, ...) shows in the key set.
bool is_ordinary(const at::Tensor& tensor) {
  static const c10::DispatchKeySet ordinary = [] {
    const c10::InferenceMode off(false);
    return at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                    caffe2::TypeMeta::Make<float>(), c10::Device(c10::kCPU))
        .key_set();
  }();
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->key_set() == ordinary && !impl->has_symbolic_sizes_strides() && impl->has_storage() &&
         impl->dim() <= 255;
}

bool is_simple(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

// The __dict__ of `object` when the fast path can keep it, an empty object when there is none to keep.
// False: it holds something that pickle must see.
bool simple_attributes(PyObject* object, py::object& attributes) {
  attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  if (!attributes) throw py::error_already_set();
  if (PyDict_GET_SIZE(attributes.ptr()) == 0) {
    attributes = py::object();
    return true;
  }
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(attributes.ptr(), &position, &name, &value))
    if (!PyUnicode_CheckExact(name) || !is_simple(value)) return false;
  return true;
}

bool shared_with_others(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.unsafeGetStorageImpl()->data_ptr();
  if (data.get_deleter() == c10::GetCPUAllocator()->raw_deleter()) return false;
  // A private file mapping is a MapAllocator too, and is as good as ordinary memory.
  if (const auto* map = at::MapAllocator::fromDataPtr(data))
    return (map->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) != 0;
  const auto object = py::reinterpret_steal<py::object>(THPStorage_Wrap(storage));
  if (!object) throw py::error_already_set();
  return object.attr("is_shared")().cast<bool>();
}

}  // namespace

Packer::Packer(const py::dict& substitutes, py::object inspector_of) : inspector_of_(std::move(inspector_of)) {
  for (const auto& [id, number] : substitutes)
    substitutes_.emplace(reinterpret_cast<PyObject*>(id.cast<std::uintptr_t>()), number.cast<std::uint32_t>());
}

py::object Packer::persistent_id(PyObject* object) {
  if (!substitutes_.empty()) {
    const auto found = substitutes_.find(object);
    if (found != substitutes_.end()) {
      const auto known = ids_.find(object);
      if (known != ids_.end()) return known->second;
      return add_item(object, {ItemKind::kSubstitute, 0, 0, 0, found->second, 0});
    }
  }
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyUnicode_Type || type == &PyDict_Type || type == &PyTuple_Type || type == &PyLong_Type)
    return py::none();
  const TypeEntry& entry = classify(type);
  if (entry.inspector != nullptr)
    py::reinterpret_borrow<py::object>(entry.inspector)(py::reinterpret_borrow<py::object>(object));
  if (entry.verdict == Verdict::kPlain) return py::none();
  const auto known = ids_.find(object);
  if (known != ids_.end()) return known->second;
  if (entry.verdict == Verdict::kUntypedStorage)
    return storage_id(object, object, ItemKind::kUntypedStorage, c10::ScalarType::Byte);
  if (entry.verdict == Verdict::kTypedStorage) {
    const auto typed = py::reinterpret_borrow<py::object>(object);
    const py::object dtype = typed.attr("dtype");
    const auto scalar_type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    return storage_id(object, typed.attr("_untyped_storage").ptr(), ItemKind::kTypedStorage, scalar_type);
  }
  return tensor_id(object, entry.verdict);
}

const Packer::TypeEntry& Packer::classify(PyTypeObject* type) {
  const auto found = types_.find(type);
  if (found != types_.end()) return found->second;
  kept_.append(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type)));
  return types_.emplace(type, judge(type)).first->second;
}

Packer::TypeEntry Packer::judge(PyTypeObject* type) {
  static const py::handle typed_storage =
      py::object(py::module_::import("torch.storage").attr("TypedStorage")).release();
  auto* object = reinterpret_cast<PyObject*>(type);
  if (object == THPVariableClass) return {Verdict::kTensor, nullptr};
  if (object == ParameterClass) return {Verdict::kParameter, nullptr};
  if (type == THPStorageClass) return {Verdict::kUntypedStorage, nullptr};
  if (object == typed_storage.ptr()) return {Verdict::kTypedStorage, nullptr};
  py::object inspector = py::none();
  if (!inspector_of_.is_none()) inspector = inspector_of_(py::reinterpret_borrow<py::object>(object));
  if (!inspector.is_none()) kept_.append(inspector);
  const bool tensor = PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
  return {tensor ? Verdict::kTensorSubclass : Verdict::kPlain, inspector.is_none() ? nullptr : inspector.ptr()};
}

py::object Packer::tensor_id(PyObject* object, Verdict verdict) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  refuse_lost_state(object, tensor);
  if (!tensor.device().is_cpu() && !tensor.device().is_meta())
    refuse(describe(tensor) + " is on " + tensor.device().str() + ", not on the CPU");
  py::object attributes;
  if (verdict == Verdict::kTensorSubclass || !is_ordinary(tensor) || !simple_attributes(object, attributes))
    return py::none();
  const std::uint32_t index = storage_index(tensor.storage());
  const auto kind = verdict == Verdict::kParameter ? ItemKind::kParameter : ItemKind::kTensor;
  const ItemRecord record{kind,
                          static_cast<std::uint8_t>(tensor.scalar_type()),
                          tensor.requires_grad() ? kRequiresGrad : std::uint8_t{0},
                          static_cast<std::uint8_t>(tensor.dim()),
                          index,
                          tensor.storage_offset()};
  if (!tensor_fits(record.offset, tensor.itemsize(), storages_[index].nbytes, tensor.sizes(), tensor.strides()))
    refuse(describe(tensor) + " reaches beyond its storage");
  if (attributes) attributes_.append(py::make_tuple(item_count_, attributes));
  return add_item(object, record, tensor.sizes(), tensor.strides());
}

py::object Packer::storage_id(PyObject* object, PyObject* untyped, ItemKind kind, c10::ScalarType dtype) {
  const c10::Storage& storage = THPStorage_Unpack(untyped);
  if (!storage.device().is_cpu()) refuse("a storage on " + storage.device().str() + ", not on the CPU");
  return add_item(object, {kind, static_cast<std::uint8_t>(dtype), 0, 0, storage_index(storage), 0});
}

std::uint32_t Packer::storage_index(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const auto found = storage_indices_.find(impl);
  if (found != storage_indices_.end()) return found->second;
  if (shared_with_others(storage)) refuse("a tensor whose memory is shared with other processes");
  const void* data = impl->data_ptr().get();
  const std::uint64_t nbytes = impl->nbytes();
  if (nbytes > 0 && data == nullptr) refuse("a storage of " + std::to_string(nbytes) + " bytes without memory");
  if (data != nullptr && at::globalContext().hasCUDA() && at::globalContext().isPinnedPtr(data))
    refuse("a tensor in pinned memory");
  const auto index = static_cast<std::uint32_t>(storages_.size());
  storages_.push_back({nbytes, impl->resizable() ? 1u : 0u, 0});
  if (nbytes > 0) buffers_.emplace_back(reinterpret_cast<std::uintptr_t>(data), nbytes);
  storage_indices_.emplace(impl, index);
  return index;
}

py::object Packer::add_item(PyObject* object, const ItemRecord& record, c10::IntArrayRef sizes,
                            c10::IntArrayRef strides) {
  items_.append(reinterpret_cast<const char*>(&record), sizeof(record));
  items_.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
  items_.append(reinterpret_cast<const char*>(strides.data()), strides.size() * sizeof(int64_t));
  kept_.append(py::reinterpret_borrow<py::object>(object));
  py::object id = py::int_(item_count_++);
  ids_.emplace(object, id);
  return id;
}

py::tuple Packer::finish() {
  std::string attributes;
  if (!attributes_.empty())
    attributes = py::module_::import("pickle").attr("dumps")(attributes_, 5).cast<std::string>();
  const auto next_hook_id =
      py::module_::import("torch.utils.hooks").attr("RemovableHandle").attr("next_id").cast<std::uint64_t>();
  const RecordsHeader header{
      kRecordsMagic, static_cast<std::uint32_t>(storages_.size()),  static_cast<std::uint32_t>(buffers_.size()),
      item_count_,   static_cast<std::uint32_t>(attributes.size()), 0,
      next_hook_id};
  std::string records(reinterpret_cast<const char*>(&header), sizeof(header));
  records.append(reinterpret_cast<const char*>(storages_.data()), storages_.size() * sizeof(StorageRecord));
  records += items_;
  records += attributes;
  py::list buffers;
  for (const auto& [address, nbytes] : buffers_) buffers.append(py::make_tuple(address, nbytes));
  return py::make_tuple(py::bytes(records), buffers, kept_);
}

}  // namespace overmind
