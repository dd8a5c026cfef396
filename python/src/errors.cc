// The one bridge from shardow::Error to Python. The classes are made in shardow/_errors.py, where each is also the built-in that it resembles.
#include <nanobind/stl/string.h>

#include "core.h"
#include "shardow/error.h"

namespace nb = nanobind;

namespace shardow::python {
namespace {

const char* name(Code code) {
  switch (code) {
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kNotFound: return "not_found";
    case Code::kCorrupt: return "corrupt";
    case Code::kUnsupported: return "unsupported";
    case Code::kIo: return "io";
    case Code::kOutOfSpace: return "out_of_space";
    case Code::kTimeout: return "timeout";
    case Code::kPeerFailed: return "peer_failed";
    case Code::kInternal: break;
  }
  return "internal";
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    nb::object made = nb::module_::import_("shardow._errors").attr("make")(name(error.code()), error.what(), error.os_errno());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  }
}

}  // namespace

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace shardow::python
