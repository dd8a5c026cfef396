#include "file/reader.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "file/crc.h"
#include "file/feed.h"
#include "file/layout.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

constexpr int64_t kGapBytes = 4096;      // read and thrown away, where that saves a call
constexpr int kLanes = 4;                // reads in flight: what network and solid-state disks ask for
constexpr int64_t kStepBytes = 1 << 20;  // read, then checked while it is in the cache

std::byte* destination(const Reader::Job& job, int64_t element) {
  return static_cast<std::byte*>(job.view->data) + element * dtype_bits(job.view->dtype) / 8;
}

void place(std::span<const std::byte> from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from.data(), from.size());
  } else {
    kernels::cpu::cast(from.data(), from_dtype, to, to_dtype, count);
  }
}

int lanes_for(const std::vector<Reader::Job>& jobs) {
  int64_t bytes = 0;
  for (const Reader::Job& job : jobs) bytes += job.view->region.size() * dtype_bits(job.stored->entry.dtype) / 8;
  return static_cast<int>(std::clamp<int64_t>(bytes / kChunkBytes, 1, kLanes));
}

}  // namespace

Reader::Reader(const Catalog& catalog, std::vector<Job> jobs, size_t tensors)
    : catalog_(catalog), jobs_(std::move(jobs)), lanes_(lanes_for(jobs_)), crcs_(tensors, 0), files_(catalog.files.size()) {}

Part Reader::part() {
  const int64_t before = read_;
  const PartTime time;
  std::vector<std::thread> others;
  try {
    for (int lane = 1; lane < lanes_; ++lane) others.emplace_back([&] { work(time); });
  } catch (const std::system_error&) {  // no more threads: fewer reads in flight
  }
  work(time);
  for (std::thread& other : others) other.join();
  const base::Lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  return {read_ - before, next_ == jobs_.size()};
}

void Reader::work(const PartTime& time) {
  try {
    Lane lane;
    Read read;
    while (!time.over() && next(read)) perform(read, lane);
    lane.pinned.finish();
  } catch (...) {
    const base::Lock lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

bool Reader::next(Read& read) {
  const base::Lock lock(mutex_);
  while (next_ < jobs_.size() && !failure_) {
    const Job& job = jobs_[next_];
    if (!runs_) {
      runs_ = std::make_unique<RunCursor>(job.view->region);
      run_ = runs_->next();
    }
    if (run_) {
      auto& file = files_[job.stored->file];
      if (!file) file = std::make_unique<base::File>(base::File::open(catalog_.files[job.stored->file].path));
      read.job = &job;
      read.file = file.get();
      take_runs(read);
      return true;
    }
    runs_.reset();
    ++next_;
  }
  return false;
}

/// A chunk of a long run, or the current run and those that lie close behind it.
void Reader::take_runs(Read& read) {
  const DType dtype = read.job->stored->entry.dtype;
  const int64_t most = std::min(chunk_elements(dtype), chunk_elements(read.job->view->dtype));
  read.runs.assign(1, {run_->global_begin, run_->local_begin, std::min(run_->length, most)});
  if (run_->length > most) {
    *run_ = {run_->global_begin + most, run_->local_begin + most, run_->length - most};
    return;
  }
  while ((run_ = runs_->next())) {
    const Run& last = read.runs.back();
    const int64_t gap = (run_->global_begin - last.global_begin - last.length) * dtype_bits(dtype) / 8;
    if (gap > kGapBytes || run_->global_begin + run_->length - read.runs[0].global_begin > most) return;
    read.runs.push_back(*run_);
  }
}

/// Local memory has the runs one after another: a single one of the file's dtype is read there, others through the buffer; on a device
/// they are put together in pinned memory and copied in one.
void Reader::perform(const Read& read, Lane& lane) {
  const Job& job = *read.job;
  const Entry& entry = job.stored->entry;
  const TensorView& view = *job.view;
  const int64_t begin = bytes_of(read.runs[0].global_begin, entry);
  const int64_t end = bytes_of(read.runs.back().global_begin + read.runs.back().length, entry);
  const int64_t first = read.runs[0].local_begin, last = read.runs.back().local_begin + read.runs.back().length;
  std::byte* const to = on_device(view.device) ? lane.pinned.data() : destination(job, first);
  if (read.runs.size() == 1 && entry.dtype == view.dtype) {
    read_in_steps(read, to, begin, end);
  } else {
    lane.buffer.resize(static_cast<size_t>(kChunkBytes));
    read_in_steps(read, lane.buffer.data(), begin, end);
    for (const Run& run : read.runs) {
      const int64_t at = bytes_of(run.global_begin, entry) - begin, bytes = bytes_of(run.length, entry);
      const auto data = std::span<const std::byte>(lane.buffer).subspan(static_cast<size_t>(at), static_cast<size_t>(bytes));
      place(data, entry.dtype, to + (run.local_begin - first) * dtype_bits(view.dtype) / 8, view.dtype, run.length);
    }
  }
  if (on_device(view.device))
    lane.pinned.copy_to(destination(job, first), static_cast<size_t>((last - first) * dtype_bits(view.dtype) / 8), view.device);
  read_ += end - begin;
}

/// Bytes [begin, end) of the tensor, counting those that are in the runs while they are in the cache.
void Reader::read_in_steps(const Read& read, std::byte* to, int64_t begin, int64_t end) {
  const Job& job = *read.job;
  const int64_t at = catalog_.files[job.stored->file].data_begin + job.stored->entry.begin;
  size_t next = 0;
  for (int64_t step = begin; step < end; step += kStepBytes) {
    const std::span<std::byte> data(to + (step - begin), static_cast<size_t>(std::min(kStepBytes, end - step)));
    read.file->read(data, at + step);
    const int64_t reached = step + static_cast<int64_t>(data.size());
    while (next < read.runs.size()) {
      const int64_t run_begin = bytes_of(read.runs[next].global_begin, job.stored->entry);
      const int64_t run_end = run_begin + bytes_of(read.runs[next].length, job.stored->entry);
      const int64_t from = std::max(run_begin, step), until = std::min(run_end, reached);
      if (from < until) count(job, std::span(to + (from - begin), static_cast<size_t>(until - from)), from);
      if (run_end > reached) break;
      ++next;
    }
  }
}

void Reader::count(const Job& job, std::span<const std::byte> data, int64_t begin) {
  if (!job.checked) return;
  const int64_t size = job.stored->entry.end - job.stored->entry.begin;
  const uint64_t part = crc32_contribution(crc32(0, data), size - begin - static_cast<int64_t>(data.size()));
  std::atomic_ref(crcs_[job.tensor]).fetch_xor(part);
}

}  // namespace shardow::file
