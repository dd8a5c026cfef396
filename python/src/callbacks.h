// What the engine calls while it works without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <utility>

#include "base/files.h"
#include "core.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"

namespace shardow::python {

inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

inline std::chrono::steady_clock::time_point in_seconds(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

inline double seconds_left(std::chrono::steady_clock::time_point deadline) {
  return std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count();
}

/// Python that the engine calls: its exception is raised on this rank, and is all ranks' error. It goes on where this
/// was made: what it opens may outlive the operation, whose calls do not.
class Callbacks {
 public:
  /// fn(), with the GIL; `what` it is, for other ranks' messages. `as_such`: other ranks' error is of our exceptions'
  /// own kind.
  template <class Fn>
  auto call(const char* what, Fn fn, bool as_such = true) {
    const base::CallsTo outside(&outside_);
    const nanobind::gil_scoped_acquire gil;
    try {
      return fn();
    } catch (const nanobind::python_error& error) {
      raised_ = std::current_exception();
      if (as_such) throw_if_ours(error);
      throw Error(Code::kPeerFailed, what + without_stack(error));
    }
  }

  ProgressFn progress(const nanobind::object& told) {
    if (told.is_none()) return {};
    return
        [this, told = &told](int64_t done, int64_t total) { call("progress= raised ", [&] { (*told)(done, total); }); };
  }

  /// work(), without the GIL; throws what was raised by what it called.
  template <class Fn>
  void run(Fn work) {
    raised_ = nullptr;
    try {
      const nanobind::gil_scoped_release release;
      work();
    } catch (...) {
      if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
      throw;
    }
  }

 private:
  base::Syscalls& outside_ = base::syscalls();
  std::exception_ptr raised_;
};

}  // namespace shardow::python
