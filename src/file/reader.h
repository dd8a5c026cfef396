// Reads this rank's bytes: long runs straight into place, short ones that lie close together in one read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/files.h"
#include "file/catalog.h"
#include "file/together.h"
#include "shardow/region.h"
#include "shardow/tensor_view.h"

namespace shardow::file {

class Reader {
 public:
  struct Job {
    const TensorView* view;
    const Stored* stored;
    size_t tensor;
    bool checked;  ///< this rank counts it for the checksum
  };

  Reader(const Catalog& catalog, std::vector<Job> jobs, size_t tensors);

  Part part();  ///< half a second's work

  std::vector<uint64_t>& crcs() { return crcs_; }  ///< by tensor: what this rank contributes
  int64_t bytes() const { return read_; }

 private:
  void step();
  void read_run(const Job& job, int64_t count);
  void near_runs(int64_t most);
  void read(const Job& job, std::span<std::byte> data, int64_t begin);
  void count_bytes(const Job& job, std::span<const std::byte> data, int64_t begin);

  const Catalog& catalog_;
  std::vector<Job> jobs_;
  std::vector<uint64_t> crcs_;
  std::vector<std::unique_ptr<base::File>> files_;
  std::vector<std::byte> buffer_;
  std::vector<Run> near_;
  std::unique_ptr<RunCursor> runs_;  // of jobs_[next_]
  std::optional<Run> run_;
  size_t next_ = 0;
  int64_t read_ = 0;
};

}  // namespace shardow::file
