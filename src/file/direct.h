// Long runs: each rank writes its own straight into place, chunk by chunk; what is produced, by several threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "file/feed.h"
#include "file/lanes.h"
#include "file/output.h"
#include "group/collective_call.h"
#include "tensor/runs.h"

namespace shardow::file {

class Direct {
 public:
  /// `mine` outlives it. One thread works for each output; `count_only`: checksums, nothing is written.
  Direct(const std::vector<Mine>& mine, const Layout& layout, std::deque<Output>& outputs, bool count_only);

  group::Part part();  ///< half a second's work

 private:
  /// Elements of a part that are neighbours in the file.
  struct Chunk {
    const Mine* mine;
    Run run;
  };

  bool next(std::vector<Chunk>& chunks);
  bool find_run() SHARDOW_REQUIRES(mutex_);
  void perform(const Chunk& chunk, Feed& feed, Output& output);

  const std::vector<Mine>& mine_;
  const Layout& layout_;
  std::deque<Output>& outputs_;
  bool count_only_;
  std::deque<Feed> feeds_;         // by output
  std::vector<size_t> order_;      // of `mine`, as it lies in the files
  std::atomic<int64_t> done_ = 0;  // bytes
  Lanes lanes_;

  base::Mutex mutex_;
  std::optional<RunCursor> runs_ SHARDOW_GUARDED_BY(mutex_);  // of mine_[order_[next_]]
  std::optional<Run> run_ SHARDOW_GUARDED_BY(mutex_);
  size_t next_ SHARDOW_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardow::file
