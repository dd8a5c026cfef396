// Each rank reads the bytes of its own regions: long runs straight into place, short ones that lie close together in one read.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "base/errors.h"
#include "file/catalog.h"
#include "file/crc.h"
#include "file/plan.h"
#include "file/together.h"
#include "kernels/kernels.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using base::fail;
using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = int64_t{8} << 20;
constexpr int64_t kGapBytes = 4096;  // read and thrown away, where that saves a call
constexpr std::chrono::milliseconds kPart{500};

bool can_cast(DType from, DType to) {
  return from == to || (is_floating(from) && is_floating(to) && dtype_bits(from) >= 16 && dtype_bits(to) >= 16);
}

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 20;
  std::string out =
      fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kMost)), ", "));
  if (names.size() > kMost) out += fmt::format(" and {} more", names.size() - kMost);
  return out;
}

/// Everything that does not fit, in one message, before anything is read. The same on every rank.
LoadReport compare(const Catalog& catalog, const std::vector<Shared>& wanted, const LoadOptions& options, const std::string& where) {
  LoadReport report;
  std::vector<std::string> unfit;
  for (const Shared& tensor : wanted) {
    const auto found = catalog.tensors.find(tensor.name);
    if (found == catalog.tensors.end()) {
      report.missing.push_back(tensor.name);
    } else if (found->second.entry.shape != tensor.shape) {
      unfit.push_back(fmt::format("'{}' has shape [{}] in the file and [{}] here", tensor.name, fmt::join(found->second.entry.shape, ", "),
                                  fmt::join(tensor.shape, ", ")));
    } else if (!can_cast(found->second.entry.dtype, tensor.dtype)) {
      unfit.push_back(
          fmt::format("'{}' is {} in the file and {} here", tensor.name, dtype_name(found->second.entry.dtype), dtype_name(tensor.dtype)));
    }
  }
  for (const auto& [name, stored] : catalog.tensors) {
    const auto found =
        std::lower_bound(wanted.begin(), wanted.end(), name, [](const Shared& a, const std::string& b) { return a.name < b; });
    if (found == wanted.end() || found->name != name) report.unexpected.push_back(name);
  }
  if (options.strict && !report.missing.empty()) unfit.push_back("missing in the file: " + listed(report.missing));
  if (options.strict && !report.unexpected.empty()) unfit.push_back("unexpected in the file: " + listed(report.unexpected));
  if (!unfit.empty()) fail(Code::kInvalidArgument, "{} does not fit, nothing was loaded: {}", where, fmt::join(unfit, "; "));
  report.metadata = catalog.metadata;
  return report;
}

/// Which tensors' checksums can be compared: those of which the ranks together read everything, each element counted by one rank.
std::vector<bool> verifiable(const Catalog& catalog, const std::vector<Shared>& wanted) {
  std::vector<bool> result;
  for (const Shared& tensor : wanted) {
    const auto found = catalog.tensors.find(tensor.name);
    std::vector<Region> regions = {Region::whole(tensor.shape).window(0, 0)};
    for (const Shared::Piece& piece : tensor.pieces) regions.push_back(piece.region);
    result.push_back(found != catalog.tensors.end() && found->second.crc && covers_once(regions));
  }
  return result;
}

/// This rank's reads, one after another. A tensor that the catalog lacks is left as it is.
class Reader {
 public:
  struct Job {
    const TensorView* view;
    const Stored* stored;
    size_t tensor;
    bool checked;  ///< this rank counts it for the checksum
  };

  Reader(const Catalog& catalog, std::vector<Job> jobs, size_t tensors)
      : catalog_(catalog), jobs_(std::move(jobs)), crcs_(tensors, 0), files_(catalog.files.size()) {}

  Part part() {
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

  std::vector<uint64_t>& crcs() { return crcs_; }
  int64_t bytes() const { return read_; }

 private:
  /// One read: a part of a long run, or several short ones.
  void step() {
    const Job& job = jobs_[next_];
    const Entry& entry = job.stored->entry;
    const int64_t most = kChunkBytes * 8 / dtype_bits(entry.dtype) / 16 * 16;
    if (run_->length >= most || !short_runs(most)) {
      const int64_t count = std::min(run_->length, most);
      read_run(job, count);
      *run_ = {run_->global_begin + count, run_->local_begin + count, run_->length - count};
      if (run_->length == 0) run_ = runs_->next();
    }
  }

  void read_run(const Job& job, int64_t count) {
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

  /// The current run and those after it that lie close behind, in one read. False, and nothing done, where there is but one.
  bool short_runs(int64_t most) {
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
      return true;
    }
    const int64_t begin = bytes_of(near_[0].global_begin, entry), end = bytes_of(near_.back().global_begin + near_.back().length, entry);
    buffer_.resize(static_cast<size_t>(kChunkBytes));
    read(job, std::span(buffer_).first(static_cast<size_t>(end - begin)), begin);
    for (const Run& run : near_) {
      const int64_t first = bytes_of(run.global_begin, entry), last = bytes_of(run.global_begin + run.length, entry);
      const std::span<const std::byte> data =
          std::span(buffer_).subspan(static_cast<size_t>(first - begin), static_cast<size_t>(last - first));
      count_bytes(job, data, first);
      kernels_cast(data, entry.dtype, destination(job, run.local_begin), job.view->dtype, run.length);
    }
    run_ = after;
    return true;
  }

  static void kernels_cast(std::span<const std::byte> from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count) {
    if (from_dtype == to_dtype) {
      std::memcpy(to, from.data(), from.size());
    } else {
      kernels::cpu::cast(from.data(), from_dtype, to, to_dtype, count);
    }
  }

  void read(const Job& job, std::span<std::byte> data, int64_t begin) {
    auto& file = files_[job.stored->file];
    const Catalog::Source& source = catalog_.files[job.stored->file];
    if (!file) file = std::make_unique<base::File>(base::File::open(source.path));
    file->read(data, source.data_begin + job.stored->entry.begin + begin);
    read_ += static_cast<int64_t>(data.size());
  }

  void count_bytes(const Job& job, std::span<const std::byte> data, int64_t begin) {
    if (!job.checked) return;
    const int64_t size = job.stored->entry.end - job.stored->entry.begin;
    crcs_[job.tensor] ^= crc32_contribution(crc32(0, data), size - begin - static_cast<int64_t>(data.size()));
  }

  static int64_t bytes_of(int64_t elements, const Entry& entry) {
    const int64_t bits = elements * dtype_bits(entry.dtype);
    if (bits % 8 != 0)
      fail(Code::kUnsupported, "'{}' is cut inside a byte of its {} elements; shard it elsewhere", entry.name, dtype_name(entry.dtype));
    return bits / 8;
  }

  static std::byte* destination(const Job& job, int64_t element) {
    return static_cast<std::byte*>(job.view->data) + element * dtype_bits(job.view->dtype) / 8;
  }

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

std::vector<Reader::Job> jobs_for(int rank, std::span<const TensorView> views, const Catalog& catalog, const std::vector<Shared>& wanted,
                                  const std::vector<bool>& verified) {
  std::vector<Reader::Job> jobs;
  for (const TensorView& view : views) {
    const auto stored = catalog.tensors.find(view.name);
    if (stored == catalog.tensors.end()) continue;
    const auto shared =
        std::lower_bound(wanted.begin(), wanted.end(), view.name, [](const Shared& a, const std::string& b) { return a.name < b; });
    const auto t = static_cast<size_t>(shared - wanted.begin());
    const bool first = std::any_of(shared->pieces.begin(), shared->pieces.end(),
                                   [&](const Shared::Piece& p) { return p.holders[0] == rank && p.region == view.region; });
    jobs.push_back({&view, &stored->second, t, verified[t] && first});
  }
  return jobs;
}

void check_sums(const Catalog& catalog, const std::vector<Shared>& wanted, const std::vector<bool>& verified,
                const std::vector<uint64_t>& crcs, const std::string& where) {
  std::vector<std::string> wrong;
  for (size_t t = 0; t < wanted.size(); ++t) {
    if (verified[t] && *catalog.tensors.at(wanted[t].name).crc != crcs[t]) wrong.push_back("'" + wanted[t].name + "'");
  }
  if (!wrong.empty()) {
    fail(Code::kCorrupt,
         "{}: the data of {} is not what was saved (checksums differ); the tensors that were loaded into hold it: load another checkpoint",
         where, listed(wrong));
  }
}

}  // namespace
}  // namespace file

LoadReport load(Group& group, std::span<const TensorView> views, const std::filesystem::path& path, const LoadOptions& options) {
  using namespace file;
  const auto begin = Clock::now();
  const std::chrono::milliseconds timeout = options.timeout;
  together(group, timeout, [&] {
    for (const TensorView& view : views) {
      if (view.device.kind != Device::Kind::kCpu)
        fail(Code::kUnsupported, "'{}' is on a CUDA device; loading there is not built yet: load a CPU copy", view.name);
    }
  });
  const Catalog catalog = share_catalog(group, path, timeout);
  const std::vector<Shared> wanted = exchange(group, views, Clock::now() + timeout);
  LoadReport report = compare(catalog, wanted, options, path.string());
  if (options.check_only) return report;
  const std::vector<bool> verified = options.verify ? verifiable(catalog, wanted) : std::vector<bool>(wanted.size(), false);
  Reader reader(catalog, jobs_for(group.rank(), views, catalog, wanted, verified), wanted.size());
  int64_t total = 0;
  for (const auto& [name, stored] : catalog.tensors) total += stored.entry.end - stored.entry.begin;
  in_parts(group, timeout, total, options.progress, [&] { return reader.part(); });
  if (!reader.crcs().empty()) group.all_reduce(reader.crcs(), Group::Op::kXor, Clock::now() + timeout);
  check_sums(catalog, wanted, verified, reader.crcs(), path.string());
  report.bytes_read = reader.bytes();
  report.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return report;
}

}  // namespace shardow
