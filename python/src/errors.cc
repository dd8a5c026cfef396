// The one bridge between shardow::Error and Python. The classes are made in shardow/errors.py, where each is also the
// built-in that it resembles.
#include "base/errors.h"

#include <nanobind/stl/string.h>

#include <cerrno>
#include <filesystem>

#include "core.h"
#include "group/rounds.h"

namespace nb = nanobind;

namespace shardow::python {
namespace {

void raise(Code code, const char* message, int error) try {
  const nb::object made =
      nb::module_::import_("shardow.errors").attr("make")(base::code_name(code), to_text(message), error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
} catch (nb::python_error& other) {  // a signal came, whose handler's exception goes on in its place
  other.restore();
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Raised& raised) {
    raised.restore();
  } catch (group::Interruption& interruption) {
    translate(interruption.exception(""), nullptr);
  } catch (nb::python_error& raised) {
    raised.restore();
  } catch (const Error& error) {
    raise(error.code(), error.what(), error.os_errno());
  } catch (const std::filesystem::filesystem_error& error) {
    const int number = error.code().value();
    raise(number == ENOENT || number == ENOTDIR ? Code::kNotFound : Code::kIo, error.what(), number);
  }
}

}  // namespace

nb::object to_text(const std::string& message) {
  return nb::steal(PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace"));
}

std::string bytes_of(nb::handle text) {
  PyObject* encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape");
  if (encoded == nullptr) {  // a surrogate without a byte
    PyErr_Clear();
    encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace");
  }
  if (encoded == nullptr) throw nb::python_error();
  const auto bytes = nb::steal<nb::bytes>(encoded);
  return {bytes.c_str(), bytes.size()};
}

void throw_if_ours(const nb::python_error& raised) {
  const nb::handle error = raised.value();
  if (!nb::isinstance(error, nb::module_::import_("shardow.errors").attr("Error"))) return;
  const auto name = nb::cast<std::string>(error.attr("code"));
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    const Code code = static_cast<Code>(i);
    if (name == base::code_name(code))
      throw Error(code, bytes_of(error.attr("message")), nb::cast<int>(error.attr("os_errno")));
  }
}

std::string without_stack(const nb::python_error& raised) {
  const nb::object text = nb::steal(PyObject_Str(raised.value().ptr()));
  if (!text.is_valid()) PyErr_Clear();  // an exception may fail to say what it is
  return bytes_of(raised.type().attr("__name__")) + ": " + (text.is_valid() ? bytes_of(text) : "");
}

void bind_errors(nb::module_&) {
  nb::register_exception_translator(translate);
}

}  // namespace shardow::python
