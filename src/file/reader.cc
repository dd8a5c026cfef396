#include "file/reader.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "file/crc.h"
#include "file/layout.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = int64_t{8} << 20;
constexpr int64_t kGapBytes = 4096;  // read and thrown away, where that saves a call
constexpr std::chrono::milliseconds kPart{500};

void place(std::span<const std::byte> from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from.data(), from.size());
  } else {
    kernels::cpu::cast(from.data(), from_dtype, to, to_dtype, count);
  }
}

std::byte* destination(const Reader::Job& job, int64_t element) {
  return static_cast<std::byte*>(job.view->data) + element * dtype_bits(job.view->dtype) / 8;
}

}  // namespace

Reader::Reader(const Catalog& catalog, std::vector<Job> jobs, size_t tensors)
    : catalog_(catalog), jobs_(std::move(jobs)), crcs_(tensors, 0), files_(catalog.files.size()) {}

Part Reader::part() {
  const auto begin = Clock::now();
  const int64_t before = read_;
  while (next_ < jobs_.size() && Clock::now() - begin < kPart) {
    if (!runs_) {
      runs_ = std::make_unique<RunCursor>(jobs_[next_].view->region);
      run_ = runs_->next();
    }
    if (!run_) {
      runs_.reset();
      ++next_;
    } else {
      step();
    }
  }
  return {read_ - before, next_ == jobs_.size()};
}

/// One read: a part of a long run, or several short ones.
void Reader::step() {
  const Job& job = jobs_[next_];
  const Entry& entry = job.stored->entry;
  const int64_t most = kChunkBytes * 8 / dtype_bits(entry.dtype) / 16 * 16;
  if (run_->length < most) return near_runs(most);
  read_run(job, most);
  *run_ = {run_->global_begin + most, run_->local_begin + most, run_->length - most};
  if (run_->length == 0) run_ = runs_->next();
}

void Reader::read_run(const Job& job, int64_t count) {
  const Entry& entry = job.stored->entry;
  const int64_t begin = bytes_of(run_->global_begin, entry), bytes = bytes_of(run_->global_begin + count, entry) - begin;
  std::byte* const to = destination(job, run_->local_begin);
  const bool direct = entry.dtype == job.view->dtype;
  if (!direct) buffer_.resize(static_cast<size_t>(kChunkBytes));
  const std::span<std::byte> data(direct ? to : buffer_.data(), static_cast<size_t>(bytes));
  read(job, data, begin);
  count_bytes(job, data, begin);
  if (!direct) kernels::cpu::cast(data.data(), entry.dtype, to, job.view->dtype, count);
}

/// The current run and those that lie close behind it, in one read.
void Reader::near_runs(int64_t most) {
  const Job& job = jobs_[next_];
  const Entry& entry = job.stored->entry;
  near_.assign(1, *run_);
  std::optional<Run> after;
  while ((after = runs_->next())) {
    const int64_t gap = (after->global_begin - near_.back().global_begin - near_.back().length) * dtype_bits(entry.dtype) / 8;
    if (gap > kGapBytes || after->global_begin + after->length - near_[0].global_begin > most) break;
    near_.push_back(*after);
  }
  if (near_.size() == 1) {
    read_run(job, run_->length);
    run_ = after;
    return;
  }
  const int64_t begin = bytes_of(near_[0].global_begin, entry), end = bytes_of(near_.back().global_begin + near_.back().length, entry);
  buffer_.resize(static_cast<size_t>(kChunkBytes));
  read(job, std::span(buffer_).first(static_cast<size_t>(end - begin)), begin);
  for (const Run& run : near_) {
    const int64_t first = bytes_of(run.global_begin, entry), last = bytes_of(run.global_begin + run.length, entry);
    const std::span<const std::byte> data =
        std::span(buffer_).subspan(static_cast<size_t>(first - begin), static_cast<size_t>(last - first));
    count_bytes(job, data, first);
    place(data, entry.dtype, destination(job, run.local_begin), job.view->dtype, run.length);
  }
  run_ = after;
}

void Reader::read(const Job& job, std::span<std::byte> data, int64_t begin) {
  auto& file = files_[job.stored->file];
  const Catalog::Source& source = catalog_.files[job.stored->file];
  if (!file) file = std::make_unique<base::File>(base::File::open(source.path));
  file->read(data, source.data_begin + job.stored->entry.begin + begin);
  read_ += static_cast<int64_t>(data.size());
}

void Reader::count_bytes(const Job& job, std::span<const std::byte> data, int64_t begin) {
  if (!job.checked) return;
  const int64_t size = job.stored->entry.end - job.stored->entry.begin;
  crcs_[job.tensor] ^= crc32_contribution(crc32(0, data), size - begin - static_cast<int64_t>(data.size()));
}

}  // namespace shardow::file
