// A merge is a save whose tensors are produced: every rank could make all of every tensor, and is asked for what it
// writes.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/mutex.h"
#include "base/turns.h"
#include "file/call.h"
#include "file/device.h"
#include "file/lanes.h"
#include "file/load.h"
#include "file/model_texts.h"
#include "file/ownership.h"
#include "file/sharing.h"
#include "file/sums.h"
#include "group/collective_call.h"
#include "group/counts.h"
#include "group/facts.h"
#include "group/wire.h"
#include "kernels/sums.h"
#include "merge/plan.h"
#include "merge/rules.h"
#include "tensor/coverage.h"
#include "tensor/dtype.h"

namespace shardow {
namespace merging {
namespace {

/// What must be equal on all ranks; none where there is but one.
group::Facts facts_of(const Group& group, const Plan& plan) {
  if (group.size() == 1) return {};
  group::Facts facts = {{"what is merged", plan.provenance("")}};
  for (const Tensor& tensor : plan.tensors()) {
    std::vector<std::string_view> types;
    for (const DType dtype : tensor.types) types.push_back(dtype_name(dtype));
    facts.push_back(
        {fmt::format("'{}'", tensor.name), fmt::format("{} [{}] of [{}]", dtype_name(tensor.dtype),
                                                       fmt::join(tensor.shape, ", "), fmt::join(types, ", "))});
  }
  return facts;
}

/// A merge as all ranks make it, and what they want of it. What one of them asks for, all do.
struct Agreed {
  std::optional<Plan> plan = {};
  std::optional<group::EqualFacts> same = {};
  std::optional<file::SharedTensors> wanted = {};
  std::optional<file::Asked> asked = {};
};

/// Throws on every rank where inputs differ, or a tensor has no memory. One round, where all want the same tensors.
void agree_on(group::CollectiveCall& ranks, Agreed& agreed, std::vector<MergeInput> inputs, std::optional<DType> dtype,
              std::span<const TensorView> tensors, const LoadOptions& options) {
  ranks.compare([&] {
    agreed.plan.emplace(std::move(inputs), dtype);
    file::check_memory(tensors);
    return group::Comparisons{&agreed.same.emplace("merge()", facts_of(ranks.group(), *agreed.plan)),
                              &agreed.wanted.emplace(tensors, ranks.rank()), &agreed.asked.emplace(options)};
  });
}

/// The merge's tensors, as a file would have them.
file::StoredTensors as_stored(const Plan& plan) {
  std::vector<file::Stored> all;
  for (const Tensor& tensor : plan.tensors()) all.push_back({0, {tensor.name, tensor.dtype, tensor.shape, 0, 0}, {}});
  return file::StoredTensors(std::move(all));
}

constexpr int64_t kBlock = int64_t{64} << 10;  // elements: their sums, and what is read for them, stay in the cache
constexpr size_t kBlockBytes = 8 * kBlock;     // of the largest

/// Complex numbers are pairs.
DType part_of(DType dtype) {
  return dtype == DType::kC64 ? DType::kF32 : dtype;
}
int64_t parts(DType dtype, int64_t elements) {
  return dtype == DType::kC64 ? 2 * elements : elements;
}

/// From here on what is rounded to a dtype becomes infinite: half a unit in the last place above its largest number.
double too_large(DType dtype) {
  switch (dtype) {
    case DType::kF16: return 65520;
    case DType::kBF16: return 0x1.ffp127;
    case DType::kF32: return 0x1.ffffffp127;
    default: return std::numeric_limits<double>::infinity();
  }
}

/// How many of them are numbers of that size.
uint64_t count_too_large(std::span<const double> sums, double size) {
  return static_cast<uint64_t>(
      std::count_if(sums.begin(), sums.end(), [&](double sum) { return std::abs(sum) >= size && std::isfinite(sum); }));
}

/// The bytes of a merge: any region of any of its tensors, made from the same region of the inputs.
class Sums {
 public:
  /// `plan` outlives it. `verify`: checksums of inputs are compared where they carry them.
  Sums(const Plan& plan, bool verify)
      : plan_(plan),
        verify_(verify),
        crcs_(verify ? plan.inputs().size() * plan.tensors().size() : 0, 0),
        too_large_(plan.tensors().size(), 0) {}

  /// Fills `wanted`, in host memory, in its own dtype. For any thread; each holds a block of every operand. `counted`:
  /// these bytes count for the inputs' checksums, and for sums that are too large.
  void read(const TensorView& wanted, bool counted) {
    const size_t t = *plan_.find(wanted.name);
    const Tensor& tensor = plan_.tensors()[t];
    if (!tensor.averaged) return read_input(plan_.newest(), t, wanted, counted);
    std::unique_ptr<Scratch> scratch = take();
    auto* to = static_cast<std::byte*>(wanted.data);
    std::vector<size_t> inputs;
    for (size_t j = 0; j < plan_.inputs().size(); ++j) {
      if (plan_.reads(j, tensor)) inputs.push_back(j);
    }
    const double most = too_large(part_of(wanted.dtype));
    const bool can_overflow =  // coefficients are bounded so that no others do
        std::any_of(inputs.begin(), inputs.end(), [&](size_t j) { return tensor.types[j] == DType::kF64; });
    for (int64_t begin = 0; begin < wanted.region.size(); begin += kBlock) {
      const int64_t end = std::min(wanted.region.size(), begin + kBlock);
      const Region block = wanted.region.window(begin, end);
      add(inputs, t, {wanted.name, wanted.dtype, block, nullptr}, counted, *scratch, scratch->sums.get(), true);
      const std::span<const double> sums(scratch->sums.get(), static_cast<size_t>(parts(wanted.dtype, end - begin)));
      const double largest =
          kernels::cpu::round_sums(sums.data(), to, part_of(wanted.dtype), static_cast<int64_t>(sums.size()));
      if (counted && !checked_) {
        uint64_t wrong = largest >= most ? count_too_large(sums, most) : 0;
        if (can_overflow)
          wrong += count_overflown(inputs, t, {wanted.name, wanted.dtype, block, nullptr}, *scratch, sums);
        if (wrong > 0) std::atomic_ref(too_large_[t]).fetch_add(wrong);
      }
      to += (end - begin) * dtype_bits(wanted.dtype) / 8;
    }
    give_back(std::move(scratch));
  }

  /// Counts what this rank has read; check() wants the counts of all.
  std::vector<group::Counts> counts() { return {{crcs_, group::Op::kXor}, {too_large_, group::Op::kSum}}; }

  /// Throws kCorrupt where an input's bytes are not what was saved, among tensors that the ranks together have read
  /// once; of the others `read_once` says no. Throws kInvalidArgument where numbers have become infinite in the dtype
  /// that was wanted. `then` ends the message. What this rank reads later is not counted.
  void check(const std::vector<bool>& read_once, std::string_view then = {}) {
    checked_ = true;
    if (verify_) check_bytes(read_once, then);
    check_sizes(then);
  }

  int64_t bytes_read() const { return bytes_read_; }  ///< by this rank

 private:
  /// One thread's.
  struct Scratch {
    std::unique_ptr<double[]> sums = std::make_unique_for_overwrite<double[]>(static_cast<size_t>(2 * kBlock));
    std::unique_ptr<std::byte[]> terms = std::make_unique_for_overwrite<std::byte[]>(kernels::kMostTerms * kBlockBytes);
  };

  std::unique_ptr<Scratch> take() {
    const base::Lock lock(mutex_);
    if (spare_.empty()) return std::make_unique<Scratch>();
    std::unique_ptr<Scratch> scratch = std::move(spare_.back());
    spare_.pop_back();
    return scratch;
  }

  void give_back(std::unique_ptr<Scratch> scratch) {
    const base::Lock lock(mutex_);
    spare_.push_back(std::move(scratch));
  }

  /// The sums of a block; not `scaled`: each input times 0, which is NaN where some input is infinite or NaN.
  void add(std::span<const size_t> inputs, size_t tensor, const TensorView& block, bool counted, Scratch& scratch,
           double* sums, bool scaled) {
    const std::vector<DType>& types = plan_.tensors()[tensor].types;
    for (size_t i = 0; i < inputs.size();) {
      const DType dtype = types[inputs[i]];
      const bool first = i == 0;
      std::array<kernels::Term, kernels::kMostTerms> terms{};
      size_t count = 0;
      for (; count < terms.size() && i < inputs.size() && types[inputs[i]] == dtype; ++i, ++count) {
        std::byte* const data = scratch.terms.get() + count * kBlockBytes;
        read_input(inputs[i], tensor, {block.name, dtype, block.region, data}, counted);
        terms[count] = {data, scaled ? plan_.inputs()[inputs[i]].coefficient : 0.0};
      }
      kernels::cpu::add_terms(std::span(terms).first(count), part_of(dtype), first, sums,
                              parts(dtype, block.region.size()));
    }
  }

  /// How many sums are infinite or NaN where all inputs are numbers. Those are read anew for it.
  uint64_t count_overflown(std::span<const size_t> inputs, size_t tensor, const TensorView& block, Scratch& scratch,
                           std::span<const double> sums) {
    const auto is_lost = [](double sum) { return !std::isfinite(sum); };
    if (std::none_of(sums.begin(), sums.end(), is_lost)) return 0;
    std::vector<double> zeros(sums.size());
    add(inputs, tensor, block, false, scratch, zeros.data(), false);
    uint64_t count = 0;
    for (size_t i = 0; i < sums.size(); ++i) count += is_lost(sums[i]) && zeros[i] == 0 ? 1 : 0;
    return count;
  }

  void read_input(size_t input, size_t tensor, const TensorView& block, bool counted) {
    bytes_read_ += block.region.size() * dtype_bits(block.dtype) / 8;
    const MergeInput& from = plan_.inputs()[input];
    if (const auto* const source = std::get_if<1>(&from.tensors)) {
      try {
        return (*source)->read(block);
      } catch (const std::exception&) {
        throw;
      } catch (...) {
        base::fail(Code::kPeerFailed, "{}: its source threw what is no std::exception", from.name);
      }
    }
    const file::Catalog& catalog = file::Inside::of(std::get<Checkpoint>(from.tensors));
    const file::Stored& stored = catalog.find(block.name);
    const bool sum = verify_ && counted && stored.crc && !checked_;
    const uint64_t read = file::read_summed(catalog, stored, block, sum);
    if (sum) std::atomic_ref(crcs_[place(input, tensor)]).fetch_xor(read);
  }

  void check_bytes(const std::vector<bool>& read_once, std::string_view then) const {
    std::vector<std::string> wrong;
    for (size_t j = 0; j < plan_.inputs().size(); ++j) {
      const MergeInput& input = plan_.inputs()[j];
      const auto* const opened = std::get_if<Checkpoint>(&input.tensors);
      for (size_t t = 0; opened != nullptr && t < plan_.tensors().size(); ++t) {
        const Tensor& tensor = plan_.tensors()[t];
        if (!read_once[t] || !plan_.reads(j, tensor)) continue;
        const auto crc = file::Inside::of(*opened).find(tensor.name).crc;
        if (crc && *crc != crcs_[place(j, t)]) wrong.push_back(fmt::format("'{}' of {}", tensor.name, input.name));
      }
    }
    if (!wrong.empty())
      base::fail(Code::kCorrupt, "the data of {} is not what was saved (checksums differ): merge without it{}",
                 file::listed(wrong), then);
  }

  void check_sizes(std::string_view then) const {
    std::vector<std::string> wrong;
    for (size_t t = 0; t < too_large_.size(); ++t) {
      if (too_large_[t] > 0) wrong.push_back(fmt::format("{} of '{}'", too_large_[t], plan_.tensors()[t].name));
    }
    if (!wrong.empty())
      base::fail(
          Code::kInvalidArgument,
          "sums that are numbers are beyond the largest of their dtype, and would be infinite in it: {}; choose a "
          "dtype with a wider "
          "range (float32, or bfloat16 for float16), or smaller weights{}",
          file::listed(wrong), then);
  }
  size_t place(size_t input, size_t tensor) const { return input * plan_.tensors().size() + tensor; }

  const Plan& plan_;
  bool verify_;
  std::vector<uint64_t> crcs_;       // by place(): what this rank has read; changed through std::atomic_ref
  std::vector<uint64_t> too_large_;  // by tensor, how many; changed likewise
  std::atomic<bool> checked_ = false;
  std::atomic<int64_t> bytes_read_ = 0;
  base::Mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> spare_ SHARDOW_GUARDED_BY(mutex_);
};

/// This rank's tensors, filled chunk by chunk on several threads.
class Filling {
 public:
  Filling(Sums& sums, int threads) : sums_(sums), threads_(threads) {}

  /// `counted`: whether its bytes count for checks.
  void add(const TensorView& view, bool counted) {
    constexpr int64_t kChunk = int64_t{1} << 19;  // elements
    for (int64_t begin = 0; begin < view.region.size(); begin += kChunk) {
      const int64_t end = std::min(view.region.size(), begin + kChunk);
      chunks_.push_back(
          {{view.name, view.dtype, view.region.window(begin, end), data_at(view, begin), view.device}, counted});
    }
  }

  group::Part part() {
    const group::PartTime time;
    const int64_t before = done_;
    lanes_.run(static_cast<size_t>(threads_), [&](size_t) {
      file::Pinned pinned;
      while (!time.over() && !lanes_.failed()) {
        const size_t number = next_++;
        if (number >= chunks_.size()) break;
        fill(chunks_[number], pinned);
      }
      pinned.finish();
    });
    return {done_ - before, next_ >= chunks_.size()};
  }

 private:
  struct Chunk {
    TensorView view;
    bool counted;
  };

  void fill(const Chunk& chunk, file::Pinned& pinned) {
    TensorView view = chunk.view;
    const int64_t bytes = byte_size(view.dtype, view.region.size());
    const bool copies = file::on_device(view.device);
    if (copies) view.data = pinned.data(view.device);
    sums_.read(view, chunk.counted);
    if (copies) pinned.copy_to(static_cast<std::byte*>(chunk.view.data), static_cast<size_t>(bytes), view.device);
    done_ += bytes;
  }

  Sums& sums_;
  int threads_;
  std::vector<Chunk> chunks_;
  std::atomic<size_t> next_ = 0;
  std::atomic<int64_t> done_ = 0;
  file::Lanes lanes_;
};

}  // namespace
}  // namespace merging

using namespace merging;

MergeReport merge(Group& group, std::vector<MergeInput> inputs, const std::filesystem::path& path,
                  const MergeOptions& options) {
  const auto begin = base::now();
  group.begin("merge()", options.timeout);
  if (options.check_only) {
    Agreed agreed;
    group::CollectiveCall ranks(group, options.timeout);
    agree_on(ranks, agreed, std::move(inputs), options.dtype, {}, {});
    return agreed.plan->report();
  }
  std::optional<Plan> plan;
  std::optional<Sums> sums;
  file::Producer producer;
  producer.read = [&](const TensorView& wanted) { sums->read(wanted, true); };
  producer.check = [&] { sums->check(std::vector<bool>(plan->tensors().size(), true)); };
  const auto request = [&] {
    plan.emplace(std::move(inputs), options.dtype);
    producer.threads = plan->threads(options.threads);
    producer.counts = sums.emplace(*plan, options.verify).counts();
    std::vector<TensorView> out;
    for (const Tensor& tensor : plan->tensors())
      out.push_back({tensor.name, tensor.dtype, Region::whole(tensor.shape), nullptr});
    SaveOptions saving;
    const auto* const newest = std::get_if<Checkpoint>(&plan->inputs()[plan->newest()].tensors);
    if (group.rank() == 0 && newest != nullptr) saving.texts = file::model_texts(*newest, path);
    saving.max_shard_size = options.max_shard_size;
    saving.metadata = options.metadata;
    saving.metadata[kMergeKey] = plan->provenance(options.formula);
    saving.progress = options.progress;
    group::Facts facts = facts_of(group, *plan);
    facts.push_back({"formula", options.formula});
    facts.push_back({"verify", options.verify ? "true" : "false"});
    return file::Request{{{"", std::move(out)}}, path, saving, std::move(facts)};
  };
  const file::SaveCall call{request, &producer, {}, {}, "merge()"};
  const SaveReport saved = call.begin(group, options.timeout)->write();
  MergeReport report = plan->report();
  report.files = saved.files;
  report.bytes_read = sums->bytes_read();
  report.bytes_written = saved.bytes_written;
  report.seconds = base::seconds_since(begin);
  return report;
}

LoadReport load_merged(Group& group, std::span<const TensorView> tensors, std::vector<MergeInput> inputs,
                       const LoadOptions& options) {
  const auto begin = base::now();
  group.begin("load()", options.timeout);
  // The dtypes of the tensors decide: sums are rounded to those.
  Agreed load;
  group::CollectiveCall ranks(group, options.timeout, options.progress);
  agree_on(ranks, load, std::move(inputs), DType::kF64, tensors, options);
  const Plan& plan = *load.plan;
  const std::vector<file::Shared>& wanted = load.wanted->all;
  LoadReport report =
      file::match(wanted, as_stored(plan), load.asked->has(file::kStrict), "the merge", "the inputs").report;
  report.metadata[kMergeKey] = plan.provenance("");
  if (load.asked->has(file::kCheckOnly)) return report;
  std::vector<bool> read_once(plan.tensors().size(), false);
  int64_t total = 0;
  for (const file::Shared& one : wanted) {
    if (const auto t = plan.find(one.name)) read_once[*t] = covers_once(file::regions_of(one));
    for (const file::Shared::Piece& piece : one.pieces)
      total += piece.region.size() * dtype_bits(one.dtype) / 8 * static_cast<int64_t>(piece.holders.size());
  }
  Sums sums(plan, load.asked->has(file::kVerify));
  Filling filling(sums, plan.threads(MergeOptions().threads));
  file::Finder finder(wanted);
  for (const TensorView& view : tensors) {
    const auto t = plan.find(view.name);
    if (!t) continue;
    const file::Shared& one = wanted[*finder.find(view.name)];
    const auto piece = std::find_if(one.pieces.begin(), one.pieces.end(),
                                    [&](const auto& each) { return each.region == view.region; });
    filling.add(view, piece != one.pieces.end() && piece->holders.front() == group.rank());
  }
  ranks.work(total, [&] { return filling.part(); });
  agree(group, ranks.deadline(), [&] {
    group::join_on_first(group, sums.counts(), base::after(options.timeout - options.timeout / 4));
    if (group.rank() == 0) sums.check(read_once, "; what was loaded into holds such sums, and has lost its own values");
    ranks.tell_progress();
  });
  report.bytes_read = sums.bytes_read();
  report.seconds = base::seconds_since(begin);
  return report;
}

}  // namespace shardow
