// The areas of the extension module; each file binds one, and holds no logic. Errors cross both ways in errors.cc.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "group/facts.h"

namespace shardow::python {

/// Returns a message as Python's text; a path in it may be no UTF-8, and shows as "\xff". The GIL is held.
nanobind::object to_text(const std::string& message);

/// Returns Python's text as bytes, those of paths as they are on disk. The GIL is held.
std::string bytes_of(nanobind::handle text);

inline std::string text_of(nanobind::handle bytes) {
  const auto text = nanobind::cast<nanobind::bytes>(bytes);
  return {text.c_str(), text.size()};
}
inline nanobind::bytes to_bytes(const std::string& text) {
  return nanobind::bytes(text.data(), text.size());
}

/// Returns fn() of each as Python's list. The GIL is held.
template <class From, class Fn>
nanobind::list list_of(const std::vector<From>& values, Fn fn) {
  nanobind::list list;
  for (const From& value : values) list.append(fn(value));
  return list;
}

/// Returns comparisons that Python gives as a list, which keeps them. The GIL is held.
group::Comparisons comparisons_of(nanobind::handle list);

/// Returns facts that Python gives as (name, value, hint, set).
group::Facts facts_of(const nanobind::list& facts);

/// For Python that the engine calls: throws the engine's Error where Python raised one of shardow's. The GIL is held.
void throw_if_ours(const nanobind::python_error& raised);

/// "ValueError: decay=7.0". What python_error::what() says begins with the whole stack, and a status is cut at its end.
/// The GIL is held.
std::string without_stack(const nanobind::python_error& raised);

/// An exception of Python's within a call of the engine: other ranks get its text, this one the exception.
class Raised final : public std::runtime_error {
 public:
  explicit Raised(nanobind::python_error error) : std::runtime_error(without_stack(error)), error_(std::move(error)) {}

  bool is(nanobind::handle kind) const { return error_.matches(kind); }  ///< the GIL is held, as for restore()
  void restore() const { nanobind::python_error(error_).restore(); }

 private:
  nanobind::python_error error_;
};

/// Returns fn(), or throws what it raised as Raised. The GIL is held.
template <class Fn>
auto raising(Fn fn) {
  try {
    return fn();
  } catch (nanobind::python_error& error) {
    throw Raised(std::move(error));
  }
}

void bind_engine(nanobind::module_& m);  ///< all of them

void bind_errors(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_group(nanobind::module_& m);
void bind_schedule(nanobind::module_& m);
void bind_posthoc(nanobind::module_& m);
void bind_average(nanobind::module_& m);
void bind_watch(nanobind::module_& m);
void bind_file(nanobind::module_& m);
void bind_ema(nanobind::module_& m);
void bind_merge(nanobind::module_& m);

}  // namespace shardow::python
