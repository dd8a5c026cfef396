#include "file/reader.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>
#include <utility>

#include "file/feed.h"
#include "file/layout.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

constexpr int64_t kGapBytes = 4096;      // read and thrown away, where that saves a call
constexpr int kLanes = 4;                // reads in flight: what network and solid-state disks ask for
constexpr int64_t kStepBytes = 1 << 20;  // read, then checked while it is in the cache

std::byte* destination(const TensorView& view, int64_t element) {
  return static_cast<std::byte*>(view.data) + element * dtype_bits(view.dtype) / 8;
}

void place(std::span<const std::byte> from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from.data(), from.size());
  } else {
    kernels::cpu::cast(from.data(), from_dtype, to, to_dtype, count);
  }
}

size_t lanes_for(const std::vector<Reader::Job>& jobs) {
  int64_t bytes = 0;
  for (const Reader::Job& job : jobs) bytes += job.view->region.size() * dtype_bits(job.stored->entry.dtype) / 8;
  return static_cast<size_t>(std::clamp<int64_t>(bytes / kChunkBytes, 1, kLanes));
}

std::vector<size_t> in_file_order(const std::vector<Reader::Job>& jobs) {
  std::vector<std::tuple<size_t, int64_t, size_t>>
      places;  // (file, first byte, job): side by side, a million are sorted twice as fast
  places.reserve(jobs.size());
  for (size_t j = 0; j < jobs.size(); ++j) places.emplace_back(jobs[j].stored->file, jobs[j].stored->entry.begin, j);
  std::sort(places.begin(), places.end());
  std::vector<size_t> order;
  order.reserve(jobs.size());
  for (const auto& [file, begin, job] : places) order.push_back(job);
  return order;
}

}  // namespace

Reader::Reader(const Catalog& catalog, std::vector<Job> jobs)
    : catalog_(catalog),
      jobs_(std::move(jobs)),
      order_(in_file_order(jobs_)),
      num_lanes_(lanes_for(jobs_)),
      sums_(jobs_.size(), 0) {}

group::Part Reader::part() {
  const int64_t before = done_;
  const group::PartTime time;
  lanes_.run(num_lanes_, [&](size_t) {
    Lane lane;
    Read read;
    while (!time.over() && !lanes_.failed() && next(read)) perform(read, lane);
    lane.pinned.finish();
  });
  bool last = false;
  {
    const base::Lock lock(mutex_);
    last = next_ == order_.size();
  }
  if (last) check_files();
  return {done_ - before, last};
}

void Reader::check_files() {
  std::set<size_t> files;
  for (const Job& job : jobs_) files.insert(job.stored->file);
  for (const size_t file : files) catalog_.files[file].file->check_unchanged();
}

bool Reader::next(Read& read) {
  const base::Lock lock(mutex_);
  read.pieces.clear();
  while (find_run() && (read.pieces.empty() || fits(read))) take_run(read);
  if (read.pieces.empty()) return false;
  read.file = catalog_.files[jobs_[read.pieces[0].job].stored->file].file->handle();
  return true;
}

/// Goes to the next job where the one at hand has no more runs; false after the last.
bool Reader::find_run() {
  while (next_ < order_.size() && !run_) {
    if (!runs_) {
      runs_.emplace(jobs_[order_[next_]].view->region);
    } else {
      runs_.reset();
      ++next_;
      continue;
    }
    run_ = runs_->next();
  }
  return run_.has_value();
}

/// Whether the run at hand lies close behind what is read anyway, and all of it still fits into a chunk, here and where
/// it goes.
bool Reader::fits(const Read& read) const {
  const size_t job = order_[next_];
  const size_t last_job = read.pieces.back().job;
  if (jobs_[job].stored->file != jobs_[last_job].stored->file) return false;
  const int64_t begin = place_of(job, run_->global_begin), end = place_of(job, run_->global_begin + run_->length);
  if (begin < read.end || begin - read.end > kGapBytes || end - read.begin > kChunkBytes) return false;
  const int64_t from = last_job == job ? read.pieces[read.last_job].run.global_begin : run_->global_begin;
  return run_->global_begin + run_->length - from <= chunk_of(job);
}

/// The run at hand, or a chunk of a long one.
void Reader::take_run(Read& read) {
  const size_t job = order_[next_];
  const Run taken{run_->global_begin, run_->local_begin, std::min(run_->length, chunk_of(job))};
  if (read.pieces.empty()) read.begin = place_of(job, taken.global_begin);
  if (read.pieces.empty() || read.pieces.back().job != job) read.last_job = read.pieces.size();
  read.end = place_of(job, taken.global_begin + taken.length);
  read.pieces.push_back({job, taken});
  if (taken.length < run_->length) {
    run_ = Run{taken.global_begin + taken.length, taken.local_begin + taken.length, run_->length - taken.length};
  } else {
    run_ = runs_->next();
  }
}

/// Elements of a job that fit into a chunk, as they are in the file and as they are here.
int64_t Reader::chunk_of(size_t job) const {
  return std::min(chunk_elements(jobs_[job].stored->entry.dtype), chunk_elements(jobs_[job].view->dtype));
}

/// Where an element of a job's tensor lies in its file.
int64_t Reader::place_of(size_t job, int64_t element) const {
  const Stored& stored = *jobs_[job].stored;
  return catalog_.files[stored.file].data_begin + stored.entry.begin + bytes_of(element, stored.entry);
}

/// A single run of the file's dtype is read where it goes, others through the buffer.
void Reader::perform(const Read& read, Lane& lane) {
  const auto& [j, run] = read.pieces[0];
  const TensorView& view = *jobs_[j].view;
  if (read.pieces.size() > 1 || jobs_[j].stored->entry.dtype != view.dtype) {
    if (const auto bytes = static_cast<size_t>(read.end - read.begin); lane.buffer.size() < bytes)
      lane.buffer.resize(bytes);
    read_in_steps(read, lane.buffer.data(), lane);
    put_in_place(read, lane);
  } else if (on_device(view.device)) {
    read_in_steps(read, lane.pinned.data(view.device), lane);
    lane.pinned.copy_to(destination(view, run.local_begin), static_cast<size_t>(read.end - read.begin), view.device);
  } else {
    read_in_steps(read, destination(view, run.local_begin), lane);
  }
  read_ += read.end - read.begin;
  for (const auto& [job, piece] : read.pieces) done_ += bytes_of(piece.length, jobs_[job].stored->entry);
}

/// Local memory has a job's runs one after another; on a device they are put together in pinned memory and copied in
/// one.
void Reader::put_in_place(const Read& read, Lane& lane) {
  for (size_t begin = 0, end = 0; begin < read.pieces.size(); begin = end) {
    const size_t j = read.pieces[begin].job;
    const TensorView& view = *jobs_[j].view;
    const Entry& entry = jobs_[j].stored->entry;
    const int64_t first = read.pieces[begin].run.local_begin;
    int64_t last = first;
    std::byte* const to = on_device(view.device) ? lane.pinned.data(view.device) : destination(view, first);
    for (; end < read.pieces.size() && read.pieces[end].job == j; ++end) {
      const Run& run = read.pieces[end].run;
      const auto at = static_cast<size_t>(place_of(j, run.global_begin) - read.begin);
      const auto data =
          std::span<const std::byte>(lane.buffer).subspan(at, static_cast<size_t>(bytes_of(run.length, entry)));
      place(data, entry.dtype, to + (run.local_begin - first) * dtype_bits(view.dtype) / 8, view.dtype, run.length);
      last = run.local_begin + run.length;
    }
    if (on_device(view.device))
      lane.pinned.copy_to(destination(view, first), static_cast<size_t>((last - first) * dtype_bits(view.dtype) / 8),
                          view.device);
  }
}

/// Sums up what is in the runs while it is in the cache.
void Reader::read_in_steps(const Read& read, std::byte* to, Lane& lane) {
  size_t next = 0;
  for (int64_t step = read.begin; step < read.end; step += kStepBytes) {
    const std::span<std::byte> data(to + (step - read.begin),
                                    static_cast<size_t>(std::min(kStepBytes, read.end - step)));
    read.file->read(data, step);
    const int64_t reached = step + static_cast<int64_t>(data.size());
    for (; next < read.pieces.size(); ++next) {
      const auto& [j, run] = read.pieces[next];
      const Entry& entry = jobs_[j].stored->entry;
      const int64_t base = place_of(j, 0), begin = place_of(j, run.global_begin),
                    end = begin + bytes_of(run.length, entry);
      const int64_t from = std::max(begin, step), until = std::min(end, reached);
      if (jobs_[j].summed && from < until)
        lane.sum.add(from - base, {to + (from - read.begin), static_cast<size_t>(until - from)});
      if (end > reached) break;
      if (jobs_[j].summed && (next + 1 == read.pieces.size() || read.pieces[next + 1].job != j))
        std::atomic_ref(sums_[j]).fetch_xor(lane.sum.take(entry.end - entry.begin));
    }
  }
}

}  // namespace shardow::file
