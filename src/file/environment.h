// The machine that a save or a load works on: one that a test's thread puts in place of its own, so that one rank's
// disk can fail.
#pragma once

#include <chrono>
#include <memory>

#include "base/files.h"
#include "base/seam.h"
#include "base/timed_calls.h"
#include "shardow/group.h"

namespace shardow {

/// nullptr: the machine's own. What is given outlives the files that were opened through it.
struct Environment {
  base::Syscalls* syscalls = nullptr;
};

namespace file {

/// What this thread does until the end of the scope is done in `environment`, where there is one.
class InEnvironment {
 public:
  explicit InEnvironment(const Environment* environment) noexcept
      : syscalls_(environment != nullptr ? environment->syscalls : nullptr) {}

 private:
  base::Seam<base::Syscalls>::Scope syscalls_;
};

/// For threads that work for this one.
inline Environment environment_here() noexcept {
  return {&base::syscalls()};
}

/// Returns the calls of an operation whose ranks wait for each other: where the storage hangs, they fail before the
/// ranks' timeout. Null where a test has the turns, or calls are not the machine's own.
std::unique_ptr<base::TimedCalls> timed_calls(const Group& group, std::chrono::milliseconds timeout);

}  // namespace file
}  // namespace shardow
