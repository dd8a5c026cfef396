// How the engine throws: one line, a code from the closed set and a message that names what disagrees.
//
// row_of() is the one translation of a code to text and to a process's exit status.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "shardow/error.h"

namespace shardow::base {

/// Throws Error{code}. fail(Code::kInvalidArgument, "'{}' has {} elements, not {}", name, has, wanted)
template <typename... Args>
[[noreturn]] void fail(Code code, fmt::format_string<Args...> message, Args&&... args) {
  throw Error(code, fmt::format(message, std::forward<Args>(args)...));
}

/// A code of the closed set, for others.
struct CodeRow {
  const char* name;  ///< "invalid_argument" and so on, as Python and the command line spell it
  int exit_code;     ///< of the command line: 2 for wrong calls, 3 and up for the rest; never 0, 1 (a failed check) or
                     ///< above 125 (the shell's own)
  const char* meaning;
};
CodeRow row_of(Code code) noexcept;

inline const char* code_name(Code code) noexcept {
  return row_of(code).name;
}
inline int exit_code(Code code) noexcept {
  return row_of(code).exit_code;
}

}  // namespace shardow::base
