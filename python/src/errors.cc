// The one bridge between shardow::Error and Python. The classes are made in shardow/errors.py, where each is also the
// built-in that it resembles.
#include "base/errors.h"

#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core.h"

namespace nb = nanobind;

namespace shardow::python {
namespace {

/// Paths and names in a message may be no UTF-8.
nb::object to_text(const char* message) {
  return nb::steal(PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "backslashreplace"));
}

void raise(Code code, const char* message, int error) {
  const nb::object made =
      nb::module_::import_("shardow.errors").attr("make")(base::code_name(code), to_text(message), error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    raise(error.code(), error.what(), error.os_errno());
  } catch (const std::filesystem::filesystem_error& error) {
    const int number = error.code().value();
    raise(number == ENOENT || number == ENOTDIR ? Code::kNotFound : Code::kIo, error.what(), number);
  }
}

}  // namespace

void throw_if_ours(const nb::python_error& raised) {
  const nb::handle error = raised.value();
  if (!nb::isinstance(error, nb::module_::import_("shardow.errors").attr("Error"))) return;
  const auto name = nb::cast<std::string>(error.attr("code"));
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    const Code code = static_cast<Code>(i);
    if (name == base::code_name(code))
      throw Error(code, nb::cast<std::string>(error.attr("message")), nb::cast<int>(error.attr("os_errno")));
  }
}

std::string without_stack(const nb::python_error& raised) {
  return std::string(nb::str(raised.type().attr("__name__")).c_str()) + ": " + nb::str(raised.value()).c_str();
}

void bind_errors(nb::module_&) {
  nb::register_exception_translator(translate);
}

}  // namespace shardow::python
