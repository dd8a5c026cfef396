// The calls of an operation whose ranks wait for each other.
#pragma once

#include <chrono>
#include <memory>

#include "base/timed_calls.h"
#include "shardow/group.h"

namespace shardow::file {

/// Where the storage hangs, they fail before the ranks' timeout. Null where a test has the turns, or calls are not the
/// machine's own.
std::unique_ptr<base::TimedCalls> timed_calls(const Group& group, std::chrono::milliseconds timeout);

}  // namespace shardow::file
