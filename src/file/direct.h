// Long runs: each rank writes its own straight into place, chunk by chunk.
#pragma once

#include <optional>
#include <vector>

#include "comm/parts.h"
#include "file/feed.h"
#include "file/output.h"

namespace shardow::file {

class Direct {
 public:
  /// `mine` outlives it. `count_only`: checksums, nothing is written.
  Direct(const std::vector<Mine>& mine, const Layout& layout, Output& output, bool count_only);

  comm::Part part();  ///< half a second's work

 private:
  void chunk(const Mine& mine);

  const std::vector<Mine>& mine_;
  const Layout& layout_;
  Output& output_;
  bool count_only_;
  Feed feed_;
  std::vector<size_t> order_;      // of `mine`, as it lies in the files
  std::optional<RunCursor> runs_;  // of mine_[order_[next_]]
  std::optional<Run> run_;
  size_t next_ = 0;
  int64_t done_ = 0;  // bytes
};

}  // namespace shardow::file
