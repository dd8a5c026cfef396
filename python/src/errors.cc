// The one bridge between shardow::Error and Python. The classes are made in shardow/_errors.py, where each is also the built-in that it
// resembles.
#include "base/errors.h"

#include <nanobind/stl/string.h>

#include "core.h"

namespace nb = nanobind;

namespace shardow::python {
namespace {

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    nb::object made = nb::module_::import_("shardow._errors").attr("make")(base::code_name(error.code()), error.what(), error.os_errno());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  }
}

}  // namespace

void throw_if_ours(const nb::python_error& raised) {
  const nb::handle error = raised.value();
  if (!nb::isinstance(error, nb::module_::import_("shardow._errors").attr("Error"))) return;
  const auto name = nb::cast<std::string>(error.attr("code"));
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    const Code code = static_cast<Code>(i);
    if (name == base::code_name(code))
      throw Error(code, nb::cast<std::string>(error.attr("message")), nb::cast<int>(error.attr("os_errno")));
  }
}

void bind_errors(nb::module_&) {
  nb::register_exception_translator(translate);
}

}  // namespace shardow::python
