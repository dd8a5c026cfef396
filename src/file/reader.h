// Reads this rank's bytes, several reads in flight: long runs straight into place, short ones that lie close together in one read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/files.h"
#include "base/mutex.h"
#include "file/catalog.h"
#include "file/device.h"
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
  /// Runs of one job, ascending, a chunk of the file at most from the first one's begin to the last one's end.
  struct Read {
    const Job* job;
    base::File* file;
    std::vector<Run> runs;
  };

  bool next(Read& read);
  void take_runs(Read& read) SHARDOW_REQUIRES(mutex_);
  void work(const PartTime& time);

  /// One thread's memory: what it reads into, and what it copies to a device from.
  struct Lane {
    std::vector<std::byte> buffer;
    Pinned pinned;
  };

  void perform(const Read& read, Lane& lane);
  void read_in_steps(const Read& read, std::byte* to, int64_t begin, int64_t end);
  void count(const Job& job, std::span<const std::byte> data, int64_t begin);

  const Catalog& catalog_;
  const std::vector<Job> jobs_;
  int lanes_;
  std::vector<uint64_t> crcs_;  // changed through std::atomic_ref
  std::atomic<int64_t> read_{0};

  base::Mutex mutex_;
  std::vector<std::unique_ptr<base::File>> files_ SHARDOW_GUARDED_BY(mutex_);
  std::unique_ptr<RunCursor> runs_ SHARDOW_GUARDED_BY(mutex_);  // of jobs_[next_]
  std::optional<Run> run_ SHARDOW_GUARDED_BY(mutex_);
  size_t next_ SHARDOW_GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ SHARDOW_GUARDED_BY(mutex_);
};

}  // namespace shardow::file
