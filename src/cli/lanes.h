// Work in pieces, on a few threads, with several reads in flight; results do not depend on how many.
#pragma once

#include <algorithm>
#include <atomic>

#include "cli/terminal.h"
#include "file/lanes.h"

namespace shardow::cli {

inline constexpr int kLanes = 4;  ///< reads in flight: what network and solid-state disks ask for

/// work(piece, lane) for every piece in [0, pieces), each once, roughly ascending, lane < lanes; the caller is lane 0.
/// What a piece throws, of several the first in time, ends the work and is thrown here; so is Interrupted.
template <class Work>
void in_lanes(int64_t pieces, int lanes, const Work& work) {
  std::atomic<int64_t> next{0};
  file::Lanes all;
  all.run(static_cast<size_t>(std::clamp<int64_t>(pieces, 1, lanes)), [&](size_t lane) {
    for (int64_t piece = next++; piece < pieces && !all.failed(); piece = next++) {
      check_interrupted();
      work(piece, static_cast<int>(lane));
    }
  });
}

}  // namespace shardow::cli
