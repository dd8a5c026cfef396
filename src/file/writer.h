// Writes this rank's bytes of a checkpoint's files, chunk by chunk, and their checksums' parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/files.h"
#include "file/layout.h"
#include "file/publish.h"
#include "file/together.h"
#include "shardow/region.h"

namespace shardow::file {

class Writer {
 public:
  Writer(std::span<const TensorView> views, std::vector<Owned> owned, Layout& layout, const Draft& draft, bool checksums, size_t tensors);

  Part part();    ///< half a second's work
  void finish();  ///< flushes and closes

  std::vector<uint64_t>& crcs() { return crcs_; }  ///< by tensor: what this rank contributes
  int64_t written() const { return written_; }

 private:
  bool next_run();
  void chunk();
  const std::byte* source(const TensorView& view, DType dtype, int64_t count);
  base::File& file(size_t index);

  std::span<const TensorView> views_;
  std::vector<Owned> owned_;
  Layout& layout_;
  const Draft& draft_;
  bool checksums_;
  std::vector<uint64_t> crcs_;
  std::vector<std::unique_ptr<base::File>> files_;
  std::vector<std::byte> buffer_;
  std::unique_ptr<RunCursor> runs_;  // of owned_[next_]
  size_t next_ = 0;
  int64_t global_ = 0, local_ = 0, left_ = 0;  // of the current run
  int64_t written_ = 0;
};

}  // namespace shardow::file
