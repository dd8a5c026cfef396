// Work in pieces, on a few threads, with several reads in flight; results do not depend on how many.
#pragma once

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "cli/terminal.h"

namespace shardow::cli {

inline constexpr int kLanes = 4;  ///< reads in flight: what network and solid-state disks ask for

/// work(piece, lane) for every piece in [0, pieces), each once, roughly ascending, lane < lanes; the caller is lane 0.
/// What a piece throws, of several the first in time, ends the work and is thrown here; so is Interrupted.
template <class Work>
void in_lanes(int64_t pieces, int lanes, const Work& work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  base::Mutex mutex;
  std::exception_ptr failure;  // guarded by the mutex
  const auto run = [&](int lane) {
    try {
      for (int64_t piece = next++; piece < pieces && !failed; piece = next++) {
        check_interrupted();
        work(piece, lane);
      }
    } catch (...) {
      const base::Lock lock(mutex);
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(lanes));  // nothing but a thread may fail below
  try {
    for (int lane = 1; lane < lanes && lane < pieces; ++lane) others.emplace_back(run, lane);
  } catch (const std::system_error&) {  // no more threads: fewer reads in flight
  }
  run(0);
  for (std::thread& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace shardow::cli
