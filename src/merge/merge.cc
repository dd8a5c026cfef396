// A merge is a save whose tensors are produced: every rank could make all of every tensor, and is asked for what it
// writes.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <utility>

#include "base/errors.h"
#include "base/turns.h"
#include "comm/agree.h"
#include "comm/parts.h"
#include "comm/wire.h"
#include "file/call.h"
#include "file/device.h"
#include "file/lanes.h"
#include "file/model_texts.h"
#include "file/ownership.h"
#include "file/producer.h"
#include "file/sharing.h"
#include "file/sums.h"
#include "merge/plan.h"
#include "merge/rules.h"
#include "merge/sums.h"
#include "tensor/coverage.h"
#include "tensor/dtype.h"

namespace shardow {
namespace merging {
namespace {

using Clock = std::chrono::steady_clock;

/// What must be the same on all ranks.
std::string facts(const Plan& plan, const std::vector<std::string>& others) {
  comm::Sender out;
  for (const std::string& other : others) out.text(other);
  out.text(plan.provenance(""));
  for (const Tensor& tensor : plan.tensors()) {
    out.text(tensor.name);
    out.number(static_cast<int64_t>(tensor.dtype));
    for (const DType dtype : tensor.types) out.number(static_cast<int64_t>(dtype));
    for (const int64_t size : tensor.shape) out.number(size);
  }
  return out.bytes();
}

/// The plan that all ranks have, or an error on all. `check`: what besides may fail on one of them.
Plan agreed_plan(Group& group, std::vector<MergeInput> inputs, std::optional<DType> dtype,
                 const std::vector<std::string>& others, Deadline deadline,
                 const std::function<void(const Plan&)>& check) {
  std::optional<Plan> plan;
  const auto make = [&] {
    plan.emplace(std::move(inputs), dtype);
    check(*plan);
    return group.size() == 1 ? std::string() : std::to_string(comm::digest(facts(*plan, others)));
  };
  const auto compare = [](const std::vector<std::string>& all) {
    const auto other = std::find_if(all.begin(), all.end(), [&](const std::string& one) { return one != all[0]; });
    if (other != all.end())
      base::fail(Code::kInvalidArgument, "rank {} was called with other inputs, coefficients or options than rank 0",
                 other - all.begin());
    return std::string();
  };
  comm::agree_on(group, deadline, make, compare);
  return *std::move(plan);
}

/// What does not fit between the tensors here and those of the merge, in one message; the same on every rank.
LoadReport compare(const Plan& plan, const std::vector<file::Shared>& wanted, bool strict) {
  LoadReport report;
  std::vector<std::string> unfit;
  for (const file::Shared& one : wanted) {
    const auto t = plan.find(one.name);
    if (!t) {
      report.missing.push_back(one.name);
      continue;
    }
    const Tensor& tensor = plan.tensors()[*t];
    const bool cast = is_floating(tensor.dtype) && is_floating(one.dtype) && dtype_bits(one.dtype) >= 16;
    if (tensor.shape != one.shape) {
      unfit.push_back(fmt::format("'{}' has shape [{}] in the inputs and [{}] here", one.name,
                                  fmt::join(tensor.shape, ", "), fmt::join(one.shape, ", ")));
    } else if (tensor.dtype != one.dtype && !cast) {
      unfit.push_back(fmt::format("'{}' is {} in the inputs and {} here", one.name, dtype_name(tensor.dtype),
                                  dtype_name(one.dtype)));
    }
  }
  file::Finder finder(wanted);
  for (const Tensor& tensor : plan.tensors()) {
    if (!finder.find(tensor.name)) report.unexpected.push_back(tensor.name);
  }
  if (strict && !report.missing.empty()) unfit.push_back("missing in the inputs: " + file::listed(report.missing));
  if (strict && !report.unexpected.empty())
    unfit.push_back("unexpected in the inputs: " + file::listed(report.unexpected));
  if (!unfit.empty())
    base::fail(Code::kInvalidArgument, "the merge does not fit, nothing was loaded: {}", fmt::join(unfit, "; "));
  return report;
}

/// This rank's tensors, filled chunk by chunk on several threads.
class Filling {
 public:
  /// What outlives it. `counted`: by view, whether its bytes count for checks.
  Filling(Sums& sums, int threads, std::vector<TensorView> views, std::vector<bool> counted)
      : sums_(sums), threads_(threads), views_(std::move(views)), counted_(std::move(counted)) {}

  comm::Part part() {
    const comm::PartTime time;
    const int64_t before = done_;
    lanes_.run(static_cast<size_t>(threads_), [&](size_t) {
      file::Pinned pinned;
      TensorView chunk{"", DType::kF32, Region::whole({}), nullptr};
      bool counted = false;
      while (!time.over() && !lanes_.failed() && next(chunk, counted)) fill(chunk, counted, pinned);
      pinned.finish();
    });
    const base::Lock lock(mutex_);
    return {done_ - before, view_ == views_.size()};
  }

 private:
  bool next(TensorView& chunk, bool& counted) {
    const base::Lock lock(mutex_);
    while (view_ < views_.size() && begin_ == views_[view_].region.size()) {
      ++view_;
      begin_ = 0;
    }
    if (view_ == views_.size()) return false;
    chunk = views_[view_];
    counted = counted_[view_];
    const int64_t end = std::min(chunk.region.size(), begin_ + (int64_t{1} << 19));
    chunk.region = chunk.region.window(begin_, end);
    chunk.data = static_cast<std::byte*>(chunk.data) + begin_ * dtype_bits(chunk.dtype) / 8;
    begin_ = end;
    return true;
  }

  void fill(TensorView& chunk, bool counted, file::Pinned& pinned) {
    const auto bytes = chunk.region.size() * dtype_bits(chunk.dtype) / 8;
    if (file::on_device(chunk.device)) {
      std::byte* const on_device = static_cast<std::byte*>(chunk.data);
      chunk.data = pinned.data(chunk.device);
      sums_.read(chunk, counted);
      pinned.copy_to(on_device, static_cast<size_t>(bytes), chunk.device);
    } else {
      sums_.read(chunk, counted);
    }
    done_ += bytes;
  }

  Sums& sums_;
  int threads_;
  std::vector<TensorView> views_;
  std::vector<bool> counted_;
  std::atomic<int64_t> done_ = 0;
  file::Lanes lanes_;
  base::Mutex mutex_;
  size_t view_ SHARDOW_GUARDED_BY(mutex_) = 0;
  int64_t begin_ SHARDOW_GUARDED_BY(mutex_) = 0;  // in it
};

}  // namespace
}  // namespace merging

using namespace merging;

MergeReport merge(Group& group, std::vector<MergeInput> inputs, const std::filesystem::path& path,
                  const MergeOptions& options) {
  const auto begin = Clock::now();
  group.begin("merge()", options.timeout);
  SaveOptions saving;
  const Plan plan = agreed_plan(group, std::move(inputs), options.dtype, {options.formula, path.string()},
                                base::after(options.timeout), [&](const Plan& made) {
                                  const auto* const newest =
                                      std::get_if<Checkpoint>(&made.inputs()[made.newest()].tensors);
                                  if (!options.check_only && group.rank() == 0 && newest != nullptr)
                                    saving.texts = file::model_texts(*newest, path);
                                });
  MergeReport report = plan.report();
  if (options.check_only) return report;
  merging::Sums sums(plan, options.verify);
  std::vector<TensorView> out;
  for (const Tensor& tensor : plan.tensors())
    out.push_back({tensor.name, tensor.dtype, Region::whole(tensor.shape), nullptr});
  saving.max_shard_size = options.max_shard_size;
  saving.metadata = options.metadata;
  saving.metadata[kMergeKey] = plan.provenance(options.formula);
  saving.timeout = options.timeout;
  saving.progress = options.progress;
  file::Producer producer;
  producer.read = [&](const TensorView& wanted) { sums.read(wanted, true); };
  producer.check = [&] { sums.check(group, options.timeout, std::vector<bool>(plan.tensors().size(), true)); };
  producer.threads = plan.threads(options.threads);
  const SaveReport saved = producer.save(group, out, path, saving);
  report.files = saved.files;
  report.bytes_read = sums.bytes_read();
  report.bytes_written = saved.bytes_written;
  report.seconds = base::seconds_since(begin);
  return report;
}

LoadReport load_merged(Group& group, std::span<const TensorView> tensors, std::vector<MergeInput> inputs,
                       const LoadOptions& options) {
  const auto begin = Clock::now();
  group.begin("load()", options.timeout);
  // What the inputs differ in, the tensors here decide: sums are rounded to their dtypes.
  const Plan plan = agreed_plan(group, std::move(inputs), DType::kF64, {}, base::after(options.timeout),
                                [&](const Plan&) { file::check_memory(tensors); });
  const auto shared = file::share(group, tensors, options.timeout);
  const std::vector<file::Shared>& wanted = *shared;
  std::array<uint64_t, 3> asked = {options.strict, options.verify,
                                   options.check_only};  // what one rank asks for, all do
  group.all_reduce(asked, Group::Op::kMax, base::after(options.timeout));
  const auto [strict, verify, check_only] = asked;
  LoadReport report = compare(plan, wanted, strict != 0);
  report.metadata[kMergeKey] = plan.provenance("");
  if (check_only != 0) return report;
  std::vector<bool> read_once(plan.tensors().size(), false);
  int64_t total = 0;
  for (const file::Shared& one : wanted) {
    if (const auto t = plan.find(one.name)) read_once[*t] = covers_once(file::regions_of(one));
    for (const file::Shared::Piece& piece : one.pieces)
      total += piece.region.size() * dtype_bits(one.dtype) / 8 * static_cast<int64_t>(piece.holders.size());
  }
  std::vector<TensorView> views;
  std::vector<bool> counted;
  file::Finder finder(wanted);
  for (const TensorView& view : tensors) {
    const auto t = plan.find(view.name);
    if (!t) continue;
    const file::Shared& one = wanted[*finder.find(view.name)];
    const auto piece = std::find_if(one.pieces.begin(), one.pieces.end(),
                                    [&](const auto& each) { return each.region == view.region; });
    views.push_back(view);
    counted.push_back(piece != one.pieces.end() && piece->holders.front() == group.rank());
  }
  merging::Sums sums(plan, verify != 0);
  Filling filling(sums, plan.threads(MergeOptions().threads), std::move(views), std::move(counted));
  comm::Parts parts(group, options.timeout, total, options.progress);
  parts.run([&] { return filling.part(); });
  agree(group, base::after(options.timeout), [&] { parts.tell(); });
  sums.check(group, options.timeout, read_once, "; what was loaded into holds such sums, and has lost its own values");
  report.bytes_read = sums.bytes_read();
  report.seconds = base::seconds_since(begin);
  return report;
}

}  // namespace shardow
