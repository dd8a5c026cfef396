// Where torch's tensors lie, asked by the thousand: torch answers through DLPack's exchange interface, which fills in a
// description without making any object.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace shardow::python {

/// Where a tensor lies, with which dtype, sizes and strides, as one number: equal where all of them are, different
/// otherwise, but for a chance of 2^-64.
inline uint64_t mark_of(const nanobind::dlpack::dltensor& tensor) {
  uint64_t mark = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  const auto add = [&mark](uint64_t value) { mark = (mark ^ (mark >> 29) ^ value) * 0x9e3779b97f4a7c15; };
  add(static_cast<uint64_t>(tensor.dtype.code) << 16 | tensor.dtype.bits);
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    add(static_cast<uint64_t>(tensor.shape[i]));
    if (tensor.strides != nullptr) add(static_cast<uint64_t>(tensor.strides[i]));
  }
  return mark;
}

class TorchMemory {
 public:
  /// `tensor`, `parameter`: torch's types, whose instances have memory of their own.
  TorchMemory(nanobind::type_object tensor, nanobind::type_object parameter) : tensor_(tensor), parameter_(parameter) {
    const nanobind::object capsule = nanobind::getattr(tensor, "__dlpack_c_exchange_api__", nanobind::none());
    if (capsule.is_none()) return;
    const auto* found = static_cast<const DlpackApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found == nullptr) nanobind::raise_python_error();
    if (found->major_version == 1) dlpack_ = found;
  }

  /// False where torch, or DLPack, does not know. The description borrows.
  bool describe(nanobind::handle tensor, nanobind::dlpack::dltensor& found) const {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    if (dlpack_ == nullptr || (type != tensor_.ptr() && type != parameter_.ptr())) return false;
    if (dlpack_->describe(tensor.ptr(), &found) == 0) return true;
    PyErr_Clear();
    return false;
  }

 private:
  /// Of DLPack's C exchange interface, version 1, what is used here.
  struct DlpackApi {
    uint32_t major_version, minor_version;
    void *previous, *allocate, *from_object, *to_object;
    int (*describe)(void* object, nanobind::dlpack::dltensor* out);  ///< 0: done; else an exception is set
  };

  nanobind::type_object tensor_, parameter_;
  const DlpackApi* dlpack_ = nullptr;
};

}  // namespace shardow::python
