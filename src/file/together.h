// Steps that every rank takes: an error on one is the same error on all, and slow work shows that it goes on.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "shardow/checkpoint.h"
#include "shardow/group.h"

namespace shardow::file {

/// Runs `fn` here; then, if it threw on any rank, throws on every rank: its own exception where it threw, else the first failing rank's
/// code, errno and message. kTimeout or kPeerFailed where a rank does not come within `timeout`.
void together(Group& group, std::chrono::milliseconds timeout, const std::function<void()>& fn);

/// Bytes that a part of the work did; and whether all of it is done.
struct Part {
  int64_t bytes;
  bool last;
};

/// Calls `part`, which takes about a second at most, until it is done on every rank. The timeout counts from one part to the next, not for
/// all of the work.
void in_parts(Group& group, std::chrono::milliseconds timeout, int64_t total_bytes, const ProgressFn& progress,
              const std::function<Part()>& part);

}  // namespace shardow::file
