// Watch: detects that a model's modules or the memory of its parameters have changed. It runs before every update, over
// thousands of parameters, so each costs nanoseconds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

/// Returns a tensor's address, dtype, sizes and strides as one number: equal where all of them are, different
/// otherwise, but for a chance of 2^-64.
uint64_t mark_of(const nb::dlpack::dltensor& tensor) {
  uint64_t mark = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  const auto add = [&mark](uint64_t value) { mark = (mark ^ (mark >> 29) ^ value) * 0x9e3779b97f4a7c15; };
  add(static_cast<uint64_t>(tensor.dtype.code) << 16 | tensor.dtype.bits);
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    add(static_cast<uint64_t>(tensor.shape[i]));
    if (tensor.strides != nullptr) add(static_cast<uint64_t>(tensor.strides[i]));
  }
  return mark;
}

/// Computes the marks of all kinds of tensors. Torch describes a tensor through DLPack's exchange interface, which
/// makes no object for it.
class Marks {
 public:
  /// `tensor`, `parameter`: torch's types, whose instances have their own memory. For those that torch does not
  /// describe (in older versions all), the mark is the address from `data_ptr` alone. `mark` returns that of another
  /// type's tensor.
  Marks(nb::type_object tensor, nb::type_object parameter, nb::callable mark)
      : tensor_(tensor), parameter_(parameter), data_ptr_(tensor.attr("data_ptr")), mark_(std::move(mark)) {
    const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    if (capsule.is_none()) return;
    const auto* api = static_cast<const DlpackApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) nb::raise_python_error();
    if (api->major_version == 1) dlpack_ = api;
  }

  uint64_t of(nb::handle tensor) const {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    const bool is_plain = type == tensor_.ptr() || type == parameter_.ptr();
    if (dlpack_ != nullptr && is_plain) {
      nb::dlpack::dltensor described;  // borrows
      if (dlpack_->describe(tensor.ptr(), &described) == 0) return mark_of(described);
      PyErr_Clear();
    }
    return static_cast<uint64_t>(nb::cast<int64_t>(is_plain ? data_ptr_(tensor) : mark_(tensor)));
  }

 private:
  /// The used part of DLPack's C exchange interface, version 1.
  struct DlpackApi {
    uint32_t major_version, minor_version;
    void *previous, *allocate, *from_object, *to_object;
    int (*describe)(void* object, nb::dlpack::dltensor* out);  ///< 0: done; else an exception is set
  };

  nb::type_object tensor_, parameter_;
  const DlpackApi* dlpack_ = nullptr;
  nb::object data_ptr_;
  nb::callable mark_;
};

class Watch {
 public:
  Watch(std::vector<nb::dict> modules, std::vector<nb::str> keys, std::vector<nb::object> whole,
        const std::vector<nb::object>& sharded, Marks marks, nb::callable hint)
      : modules_(std::move(modules)),
        keys_(std::move(keys)),
        tensors_(std::move(whole)),
        num_whole_(tensors_.size()),
        local_("_local_tensor"),
        marks_(std::move(marks)),
        hint_(std::move(hint)) {
    each_child([this](nb::handle child) {
      contents_.push_back(nb::borrow(child));
      return true;
    });
    tensors_.insert(tensors_.end(), sharded.begin(), sharded.end());
    recorded_.resize(tensors_.size());
    visit([this](size_t i, uint64_t mark) {
      recorded_[i] = mark;
      return true;
    });
  }

  // Returns whether the modules hold the same objects as before. It runs no Python code, so nothing can change
  // meanwhile.
  bool tree_same() const {
    size_t at = 0;
    return each_child([&](nb::handle child) { return at < contents_.size() && contents_[at++].is(child); }) &&
           at == contents_.size();
  }

  bool memory_same() {
    if (!hinted_) find_hints();
    return visit([this](size_t i, uint64_t mark) { return recorded_[i] == mark; });
  }

  // Serves Python's garbage collector: objects in a module's __dict__ may hold this watch, as where a model holds its
  // EMA.
  int traverse(visitproc visitor, void* arg) const {
    for (const nb::dict& module : modules_)
      if (const int stop = visitor(module.ptr(), arg); stop != 0) return stop;
    for (const std::vector<nb::object>* held : {&contents_, &tensors_})
      for (const nb::object& object : *held)
        if (const int stop = visitor(object.ptr(), arg); stop != 0) return stop;
    return 0;
  }

  void clear() {
    std::vector<nb::dict>().swap(modules_);
    for (std::vector<nb::object>* held : {&contents_, &tensors_}) std::vector<nb::object>().swap(*held);
    recorded_.clear();
  }

 private:
  // Gets the hints at the first check that uses them: each takes half a microsecond.
  void find_hints() {
    hinted_ = true;
    try {
      std::vector<std::pair<uintptr_t, uintptr_t>> hints;
      for (size_t i = 0; i < tensors_.size(); ++i)
        hints.push_back(nb::cast<std::pair<uintptr_t, uintptr_t>>(hint_(plain(i))));
      hints_ = std::move(hints);
    } catch (const nb::python_error&) {  // a tensor has become something else, which memory_same() finds
    }
  }

  // Calls f(child) for all objects in the modules' dicts, until it returns false. Looks the dicts up each time, since a
  // module may get new ones: by unpickling, or by a Sequential that loses a member.
  template <class F>
  bool each_child(F f) const {
    for (const nb::dict& module : modules_) {
      for (const nb::str& key : keys_) {
        PyObject* const dict = PyDict_GetItemWithError(module.ptr(), key.ptr());
        if (dict == nullptr || !PyDict_Check(dict)) return false;
        Py_ssize_t position = 0;
        PyObject* value = nullptr;
        while (PyDict_Next(dict, &position, nullptr, &value) != 0)
          if (!f(value)) return false;
      }
    }
    return true;
  }

  // Calls f(index, mark) for every tensor, until it returns false.
  template <class F>
  bool visit(F f) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      prefetch(i + kAhead);
      if (!f(i, marks_.of(plain(i)))) return false;
    }
    return true;
  }

  nb::object plain(size_t i) const { return i < num_whole_ ? tensors_[i] : tensors_[i].attr(local_); }

  // Loads a tensor's objects into the caches, which a step has emptied of them. Waits for one pointer after the other
  // would be three quarters of a check's time. Inlined by force: g++ drops a call of it as one without effect.
  [[gnu::always_inline]] void prefetch(size_t i) const {
    if (i >= hints_.size()) return;
    __builtin_prefetch(tensors_[i].ptr());
    for (uintptr_t line = 0; line < kTensorBytes; line += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(hints_[i].first + line));
    for (uintptr_t line = 0; line < kStorageBytes; line += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(hints_[i].second + line));
  }

  static constexpr size_t kAhead = 16;
  static constexpr uintptr_t kLine = 64;           // bytes
  static constexpr uintptr_t kTensorBytes = 256;   // torch's TensorImpl
  static constexpr uintptr_t kStorageBytes = 128;  // its StorageImpl

  std::vector<nb::dict> modules_;  // each module's __dict__
  std::vector<nb::str> keys_;
  std::vector<nb::object> contents_;
  std::vector<nb::object> tensors_;  // whole ones first
  size_t num_whole_;
  nb::str local_;
  Marks marks_;
  nb::callable hint_;
  bool hinted_ = false;
  std::vector<std::pair<uintptr_t, uintptr_t>> hints_;
  std::vector<uint64_t> recorded_;
};

int traverse_watch(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Watch>(self)->traverse(visit, arg) : 0;
}

int clear_watch(PyObject* self) {
  nb::inst_ptr<Watch>(self)->clear();
  return 0;
}

PyType_Slot watch_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_watch)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear_watch)},
                             {0, nullptr}};

}  // namespace

void bind_watch(nb::module_& m) {
  nb::class_<Marks>(m, "Marks", "Where tensors lie, with which dtype, sizes and strides, as one number each.")
      .def(nb::init<nb::type_object, nb::type_object, nb::callable>(), "tensor"_a, "parameter"_a, "mark"_a)
      .def(
          "of",
          [](const Marks& self, const std::vector<nb::object>& tensors) {
            std::vector<uint64_t> marks;
            for (const nb::object& tensor : tensors) marks.push_back(self.of(tensor));
            return nb::bytes(marks.data(), marks.size() * sizeof(uint64_t));
          },
          "tensors"_a, "Returns the marks of all tensors, to be compared.");
  nb::class_<Watch>(
      m, "Watch", nb::type_slots(watch_slots),
      "Remembers what modules hold, by their __dict__, in the dicts with these keys, and where and how whole tensors, "
      "and the _local_tensor of sharded ones, lie. "
      "hint(tensor): two addresses that torch will read for it; wrong ones do no harm.")
      .def(nb::init<std::vector<nb::dict>, std::vector<nb::str>, std::vector<nb::object>,
                    const std::vector<nb::object>&, Marks, nb::callable>(),
           "modules"_a, "keys"_a, "whole"_a, "sharded"_a, "marks"_a, "hint"_a)
      .def("tree_same", &Watch::tree_same, "Every module holds the very objects that it held.")
      .def("memory_same", &Watch::memory_same, "Every tensor lies where and as it lay.");
}

}  // namespace shardow::python
