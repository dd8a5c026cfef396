// Survey: what is usual of tensors by the thousand is found out without a step of Python's for each, which then looks
// at the others alone.
#include "survey.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "core.h"
#include "shardow/region.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

enum Plain : char { kNo, kOnHost, kOnDevice };

Plain is_plain(const nb::dlpack::dltensor& tensor) {
  if (!in_order(tensor)) return kNo;
  if (tensor.device.device_type == nb::device::cpu::value) return kOnHost;
  return tensor.device.device_type == nb::device::cuda::value ? kOnDevice : kNo;
}

/// Numbers what differs, in the order in which it comes; most often it is what came last.
template <class Key>
class Numbers {
 public:
  template <class Fn>
  uint32_t of(const Key& key, const Fn& is_new) {
    if (last_ != known_.end() && last_->first == key) return last_->second;
    const auto [at, added] = known_.try_emplace(key, static_cast<uint32_t>(known_.size()));
    if (added) is_new();
    last_ = at;
    return at->second;
  }

 private:
  std::map<Key, uint32_t> known_;
  typename std::map<Key, uint32_t>::iterator last_ = known_.end();
};

}  // namespace

Looked::Looked(const TorchMemory& memory, const nb::list& tensors) : memory_(memory) {
  Numbers<uint32_t> dtypes;
  Numbers<Shape> shapes;
  Shape shape;
  nb::dlpack::dltensor found;
  rows_.reserve(tensors.size());
  for (nb::handle one : tensors) {
    Row& row = rows_.emplace_back();
    if (!memory.describe(one, found) || (row.plain = is_plain(found)) == kNo) continue;
    row.mark = mark_of(found);
    row.address = reinterpret_cast<uintptr_t>(found.data) + found.byte_offset;
    row.index = found.device.device_id;
    shape.assign(found.shape, found.shape + found.ndim);
    uint64_t bits = uint64_t{found.dtype.bits} * found.dtype.lanes;
    for (const int64_t size : shape) bits *= static_cast<uint64_t>(size);
    row.bytes = (bits + 7) / 8;
    row.dtype = dtypes.of(uint32_t{found.dtype.code} << 24 | uint32_t{found.dtype.bits} << 16 | found.dtype.lanes,
                          [&] { dtypes_.append(one.attr("dtype")); });
    row.shape = shapes.of(shape, [&] { regions_.append(nb::cast(Region::whole(shape))); });
  }
}

bool Looked::still(const nb::list& tensors) const {
  if (tensors.size() != rows_.size()) return false;
  nb::dlpack::dltensor found;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].plain == kNo || !memory_.describe(tensors[i], found)) return false;
    if (is_plain(found) != rows_[i].plain || found.device.device_id != rows_[i].index ||
        mark_of(found) != rows_[i].mark)
      return false;
  }
  return true;
}

nb::bytes Looked::plain() const {
  std::string flags;
  for (const Row& row : rows_) flags.push_back(row.plain);
  return nb::bytes(flags.data(), flags.size());
}

bool Looked::apart() const {
  std::vector<const Row*> some;
  some.reserve(rows_.size());
  for (const Row& row : rows_) {
    if (row.plain == kNo) return false;
    if (row.bytes > 0) some.push_back(&row);
  }
  const auto key = [](const Row* one) { return std::tuple(one->plain, one->index, one->address); };
  const auto comes_first = [&](const Row* a, const Row* b) { return key(a) < key(b); };
  if (!std::is_sorted(some.begin(), some.end(), comes_first)) std::sort(some.begin(), some.end(), comes_first);
  const auto meet = [](const Row* a, const Row* b) {
    return a->plain == b->plain && a->index == b->index && b->address < a->address + a->bytes;
  };
  return std::adjacent_find(some.begin(), some.end(), meet) == some.end();
}

bool Looked::alone() const {
  const auto on_host = [](const Row& row) { return row.plain == kOnHost; };
  const auto empty = [](const Row& row) { return row.bytes == 0; };
  return std::all_of(rows_.begin(), rows_.end(), on_host) && std::count_if(rows_.begin(), rows_.end(), empty) < 2 &&
         apart();
}

nb::list Looked::column(nb::object (*of)(const Looked&, const Row&)) const {
  nb::list made = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(rows_.size())));
  if (!made.is_valid()) nb::raise_python_error();
  for (size_t i = 0; i < rows_.size(); ++i) {
    nb::object one = rows_[i].plain == kNo ? nb::none() : of(*this, rows_[i]);
    PyList_SetItem(made.ptr(), static_cast<Py_ssize_t>(i), one.release().ptr());  // takes it over
  }
  return made;
}

nb::list Looked::addresses() const {
  return column([](const Looked&, const Row& row) { return nb::object(nb::int_(row.address)); });
}

nb::list Looked::dtypes() const {
  return column([](const Looked& self, const Row& row) { return nb::object(self.dtypes_[row.dtype]); });
}

nb::list Looked::regions() const {
  return column([](const Looked& self, const Row& row) { return nb::object(self.regions_[row.shape]); });
}

void bind_survey(nb::module_& m) {
  nb::class_<TorchMemory>(m, "Survey", "Looks at many tensors at once.")
      .def(nb::init<nb::type_object, nb::type_object>(), "tensor"_a, "parameter"_a)
      .def(
          "look", [](const TorchMemory& self, const nb::list& tensors) { return Looked(self, tensors); }, "tensors"_a,
          nb::sig("def look(self, tensors: list[object]) -> Looked"));
  nb::class_<Looked>(m, "Looked", "What many tensors are; as they were when they were looked at.")
      .def("__len__", &Looked::size)
      .def("still", &Looked::still, "tensors"_a, nb::sig("def still(self, tensors: Sequence[object]) -> bool"),
           "These are where and what those were that were looked at; False where any is not plain.")
      .def("plain", &Looked::plain,
           "One byte for each: not 0 where it is a torch.Tensor or Parameter itself, dense, its elements in order in "
           "memory of the host (1) "
           "or of a CUDA device (2). 0: it has to be looked at.")
      .def("apart", &Looked::apart, "All are plain, and no two have bytes in common. False: they have to be looked at.")
      .def("alone", &Looked::alone,
           "All are plain and in the host's memory, none of them twice, and no two have bytes in common. False: they "
           "have to be looked at, "
           "also where two are empty.")
      .def("addresses", &Looked::addresses, nb::sig("def addresses(self) -> list[int]"), "Of plain ones.")
      .def("dtypes", &Looked::dtypes, nb::sig("def dtypes(self) -> list"), "Of plain ones.")
      .def("regions", &Looked::regions, nb::sig("def regions(self) -> list[Region]"),
           "All of each plain one; one object for each shape.");
}

}  // namespace shardow::python
