// A store of Python's for the engine's rounds.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "shardow/store.h"

namespace shardow::python {

class PyStore : public Store {
 public:
  virtual bool is_silent() const noexcept = 0;  ///< it did not answer the last time
};

/// `serve(next, answer, fail)` starts a thread, which calls the first until that returns None.
std::unique_ptr<PyStore> py_store(nanobind::object serve);

/// Interrupts the round that is under way, since Python raised that. The GIL is held.
[[noreturn]] void interrupt(nanobind::python_error raised);

/// Waits until torch's stores have answered all that this process has asked, or so many seconds.
void await_answers(double seconds);

}  // namespace shardow::python
