// Reads this rank's bytes, several reads in flight: long runs straight into place, short ones that lie close together,
// of one tensor or of neighbours, in one read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/files.h"
#include "base/mutex.h"
#include "file/catalog.h"
#include "file/crc.h"
#include "file/device.h"
#include "file/lanes.h"
#include "group/collective_call.h"
#include "shardow/region.h"
#include "shardow/tensor_view.h"
#include "tensor/runs.h"

namespace shardow::file {

class Reader {
 public:
  struct Job {
    const TensorView* view;
    const Stored* stored;
    bool summed;        ///< its checksum is wanted
    size_t number = 0;  ///< of the tensor, for whoever asks
  };

  Reader(const Catalog& catalog, std::vector<Job> jobs);

  /// Half a second's work, in bytes that were wanted. With the last of it, throws kIo where a file was written over
  /// meanwhile.
  group::Part part();

  /// By job, when all is read: what its bytes contribute to the checksum of its tensor.
  const std::vector<uint64_t>& sums() const { return sums_; }
  int64_t bytes() const { return read_; }  ///< read so far, gaps between runs included

 private:
  /// Bytes [begin, end) of a file, a chunk of them at most, and the runs in them, ascending.
  struct Read {
    struct Piece {
      size_t job;
      Run run;
    };
    std::shared_ptr<const base::File> file;
    int64_t begin, end;
    std::vector<Piece> pieces;
    size_t last_job = 0;  // where the pieces of the last job begin
  };

  /// One thread's memory: what it reads into, what it copies to a device from, and how it joins checksums.
  struct Lane {
    std::vector<std::byte> buffer;
    Pinned pinned;
    CrcSum sum;
  };

  bool next(Read& read);
  bool find_run() SHARDOW_REQUIRES(mutex_);
  bool fits(const Read& read) const SHARDOW_REQUIRES(mutex_);
  void take_run(Read& read) SHARDOW_REQUIRES(mutex_);
  void check_files();

  void perform(const Read& read, Lane& lane);
  void read_in_steps(const Read& read, std::byte* to, Lane& lane);
  void put_in_place(const Read& read, Lane& lane);
  int64_t place_of(size_t job, int64_t element) const;
  int64_t chunk_of(size_t job) const;

  const Catalog& catalog_;
  const std::vector<Job> jobs_;
  std::vector<size_t> order_;  // of the jobs, as they lie in the files
  size_t num_lanes_;
  std::vector<uint64_t> sums_;              // changed through std::atomic_ref
  std::atomic<int64_t> read_{0}, done_{0};  // bytes of the files; of them those that were wanted

  Lanes lanes_;
  base::Mutex mutex_;
  std::optional<RunCursor> runs_ SHARDOW_GUARDED_BY(mutex_);  // of jobs_[order_[next_]]
  std::optional<Run> run_ SHARDOW_GUARDED_BY(mutex_);
  size_t next_ SHARDOW_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardow::file
