// Objects of Python's by the thousand: the places of a model's tensors, and instances of classes with __slots__, made
// without a step of the interpreter for each.
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

/// Makes instances of a class whose attributes are all __slots__. Neither __init__ nor __post_init__ is called.
class Rows {
 public:
  explicit Rows(nb::type_object cls) : cls_(std::move(cls)) {
    allocate_ = reinterpret_cast<allocfunc>(PyType_GetSlot(reinterpret_cast<PyTypeObject*>(cls_.ptr()), Py_tp_alloc));
  }

  /// `columns`: a list of `count` values for each attribute, or a tuple of one value that all have. Others stay unset.
  nb::list of(Py_ssize_t count, const nb::dict& columns) const {
    nb::list made = nb::steal<nb::list>(PyList_New(count));
    if (!made.is_valid()) nb::raise_python_error();
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* row = allocate_(reinterpret_cast<PyTypeObject*>(cls_.ptr()), 0);
      if (row == nullptr) nb::raise_python_error();
      PyList_SetItem(made.ptr(), i, row);  // takes it over
    }
    put(made, columns);
    return made;
  }

  /// Sets attributes of instances.
  void put(const nb::list& rows, const nb::dict& columns) const {
    const auto count = static_cast<Py_ssize_t>(rows.size());
    const std::vector<Field> fields = fields_of(count, columns);
    for (Py_ssize_t i = 0; i < count; ++i)
      for (const Field& field : fields) field.put(PyList_GetItem(rows.ptr(), i), i);
  }

 private:
  struct Field {
    nb::object descriptor;
    descrsetfunc set;
    nb::handle list;  // null: all have `value`
    nb::handle value;

    void put(PyObject* row, Py_ssize_t i) const {
      PyObject* const one = list.is_valid() ? PyList_GetItem(list.ptr(), i) : value.ptr();
      if (set(descriptor.ptr(), row, one) != 0) nb::raise_python_error();
    }
  };

  std::vector<Field> fields_of(Py_ssize_t count, const nb::dict& columns) const {
    std::vector<Field> fields;
    for (auto [name, column] : columns) {
      nb::object descriptor = cls_.attr(name);
      const auto set = reinterpret_cast<descrsetfunc>(PyType_GetSlot(Py_TYPE(descriptor.ptr()), Py_tp_descr_set));
      const bool is_list = PyList_Check(column.ptr()) != 0;
      if (set == nullptr || static_cast<Py_ssize_t>(nb::len(column)) != (is_list ? count : 1))
        throw nb::value_error(
            ("'" + nb::cast<std::string>(name) + "' is no slot, or has too few values, or too many").c_str());
      if (is_list) {
        fields.push_back({std::move(descriptor), set, column, {}});
      } else {
        fields.push_back({std::move(descriptor), set, {}, nb::handle(PyTuple_GetItem(column.ptr(), 0))});
      }
    }
    return fields;
  }

  nb::type_object cls_;
  allocfunc allocate_;
};

/// Where modules keep tensors: five parallel lists.
struct Places {
  nb::list names, owners, keys, tensors, modules;

  void add(const nb::str& prefix, nb::handle owner, nb::handle module) {
    if (PyDict_CheckExact(owner.ptr()) != 0) {
      Py_ssize_t at = 0;
      PyObject *key = nullptr, *value = nullptr;
      while (PyDict_Next(owner.ptr(), &at, &key, &value) != 0) add(prefix, owner, key, value, module);
    } else {  // one that may have an order of its own
      for (nb::handle item : nb::list(owner.attr("items")())) add(prefix, owner, item[0], item[1], module);
    }
  }

 private:
  void add(const nb::str& prefix, nb::handle owner, nb::handle key, nb::handle value, nb::handle module) {
    if (value.is_none()) return;
    names.append(nb::steal(PyUnicode_Concat(prefix.ptr(), key.ptr())));
    owners.append(owner);
    keys.append(key);
    tensors.append(value);
    modules.append(module);
  }
};

/// (prefix with its dot, module) of each.
nb::tuple places_of(const nb::list& modules, const std::string& attribute) {
  Places found;
  const nb::str name(attribute.c_str());
  for (nb::handle one : modules) {
    const nb::object prefix = one[0], module = one[1], owner = module.attr(name);
    if (nb::len(owner) != 0) found.add(nb::cast<nb::str>(prefix), owner, module);
  }
  return nb::make_tuple(found.names, found.owners, found.keys, found.tensors, found.modules);
}

}  // namespace

void bind_rows(nb::module_& m) {
  nb::class_<Rows>(
      m, "Rows", "Makes instances of a class whose attributes are __slots__, by the thousand; __init__ is not called.")
      .def(nb::init<nb::type_object>(), "cls"_a)
      .def("of", &Rows::of, "count"_a, "columns"_a,
           nb::sig("def of(self, count: int, columns: dict[str, Sequence[object]]) -> list"),
           "`columns`: for each attribute a list of `count` values, or a tuple of one value that all have. Others stay "
           "unset.")
      .def("put", &Rows::put, "rows"_a, "columns"_a,
           nb::sig("def put(self, rows: list, columns: dict[str, Sequence[object]]) -> None"),
           "Sets attributes of instances.");
  m.def("places", &places_of, "modules"_a, "attribute"_a,
        nb::sig("def places(modules: list[tuple[str, object]], attribute: str) -> tuple[list, list, list, list, list]"),
        "Of the tensors in a mapping that each module has as `attribute`: (names, mappings, keys, tensors, modules), "
        "parallel lists. "
        "`modules`: (what names begin with, module).");
}

}  // namespace shardow::python
