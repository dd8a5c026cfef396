// Watch: are a model's modules and the memory of its parameters what they were? Asked before every update, for thousands of parameters, so
// each costs nanoseconds.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

class Watch {
 public:
  Watch(std::vector<nb::dict> dicts, std::vector<nb::object> whole, std::vector<nb::object> sharded, nb::object data_ptr,
        std::vector<std::pair<uintptr_t, uintptr_t>> hints)
      : dicts_(std::move(dicts)),
        whole_(std::move(whole)),
        sharded_(std::move(sharded)),
        local_("_local_tensor"),
        data_ptr_(std::move(data_ptr)),
        hints_(std::move(hints)) {
    for (const nb::dict& dict : dicts_)
      for (auto [key, value] : dict) contents_.push_back(nb::borrow(value));
    addresses_.resize(whole_.size() + sharded_.size());
    visit([this](size_t i, uintptr_t address) {
      addresses_[i] = address;
      return true;
    });
  }

  // The dicts hold the very objects that they held. Runs no Python code, so that nothing can change on the way.
  bool tree_same() const {
    size_t at = 0;
    for (const nb::dict& dict : dicts_) {
      Py_ssize_t position = 0;
      PyObject* value = nullptr;
      while (PyDict_Next(dict.ptr(), &position, nullptr, &value) != 0)
        if (at == contents_.size() || contents_[at++].ptr() != value) return false;
    }
    return at == contents_.size();
  }

  bool addresses_same() const {
    return visit([this](size_t i, uintptr_t address) { return addresses_[i] == address; });
  }

 private:
  // f(index, address) of every tensor, until it returns false.
  template <class F>
  bool visit(F f) const {
    size_t at = 0;
    for (const nb::object& tensor : whole_) {
      prefetch(at + kAhead);
      if (!f(at++, address(tensor))) return false;
    }
    for (const nb::object& tensor : sharded_) {
      prefetch(at + kAhead);
      if (!f(at++, address(tensor.attr(local_)))) return false;
    }
    return true;
  }

  // After a step the tensors' objects are out of the caches, and each would be waited for, one pointer after the other: three quarters of
  // the time of a check. Inlined by force: as a call, g++ takes it for a function without effect and drops it.
  [[gnu::always_inline]] void prefetch(size_t i) const {
    if (i >= hints_.size()) return;
    const PyObject* object = (i < whole_.size() ? whole_[i] : sharded_[i - whole_.size()]).ptr();
    __builtin_prefetch(object);
    for (uintptr_t line = 0; line < kTensorBytes; line += kLine) __builtin_prefetch(reinterpret_cast<const char*>(hints_[i].first + line));
    for (uintptr_t line = 0; line < kStorageBytes; line += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(hints_[i].second + line));
  }

  uintptr_t address(nb::handle tensor) const {
    const nb::object address = nb::steal(PyObject_CallOneArg(data_ptr_.ptr(), tensor.ptr()));
    if (!address.is_valid()) nb::raise_python_error();
    return nb::cast<uintptr_t>(address);
  }

  static constexpr size_t kAhead = 16;
  static constexpr uintptr_t kLine = 64;           // bytes
  static constexpr uintptr_t kTensorBytes = 256;   // torch's TensorImpl
  static constexpr uintptr_t kStorageBytes = 128;  // its StorageImpl

  std::vector<nb::dict> dicts_;
  std::vector<nb::object> contents_;
  std::vector<nb::object> whole_;
  std::vector<nb::object> sharded_;
  nb::str local_;
  nb::object data_ptr_;
  std::vector<std::pair<uintptr_t, uintptr_t>> hints_;
  std::vector<uintptr_t> addresses_;
};

}  // namespace

void bind_watch(nb::module_& m) {
  nb::class_<Watch>(m, "Watch",
                    "Remembers what the modules' dicts hold, and where whole tensors, and the _local_tensor of sharded ones, lie by "
                    "data_ptr(). hints: addresses that data_ptr() of each will read; wrong ones do no harm.")
      .def(nb::init<std::vector<nb::dict>, std::vector<nb::object>, std::vector<nb::object>, nb::object,
                    std::vector<std::pair<uintptr_t, uintptr_t>>>(),
           "dicts"_a, "whole"_a, "sharded"_a, "data_ptr"_a, "hints"_a)
      .def("tree_same", &Watch::tree_same, "Every dict holds the very objects that it held.")
      .def("addresses_same", &Watch::addresses_same, "Every tensor lies where it lay.");
}

}  // namespace shardow::python
