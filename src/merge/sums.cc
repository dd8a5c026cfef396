#include "merge/sums.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

#include "base/errors.h"
#include "base/turns.h"
#include "file/reader.h"
#include "file/sums.h"
#include "kernels/sums.h"
#include "tensor/dtype.h"

namespace shardow::merging {
namespace {

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

}  // namespace

/// One thread's.
struct Sums::Scratch {
  std::unique_ptr<double[]> sums = std::make_unique_for_overwrite<double[]>(static_cast<size_t>(2 * kBlock));
  std::unique_ptr<std::byte[]> terms = std::make_unique_for_overwrite<std::byte[]>(kernels::kMostTerms * kBlockBytes);
};

Sums::Sums(const Plan& plan, bool verify)
    : plan_(plan),
      verify_(verify),
      crcs_(plan.inputs().size() * plan.tensors().size(), 0),
      too_large_(plan.tensors().size(), 0) {}

Sums::~Sums() = default;

std::unique_ptr<Sums::Scratch> Sums::take() {
  const base::Lock lock(mutex_);
  if (spare_.empty()) return std::make_unique<Scratch>();
  std::unique_ptr<Scratch> scratch = std::move(spare_.back());
  spare_.pop_back();
  return scratch;
}

void Sums::give_back(std::unique_ptr<Scratch> scratch) {
  const base::Lock lock(mutex_);
  spare_.push_back(std::move(scratch));
}

void Sums::read(const TensorView& wanted, bool counted) {
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

/// The sums of a block; not `scaled`: each input times 0, which is NaN where some input is infinite or NaN.
void Sums::add(std::span<const size_t> inputs, size_t tensor, const TensorView& block, bool counted, Scratch& scratch,
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
uint64_t Sums::count_overflown(std::span<const size_t> inputs, size_t tensor, const TensorView& block, Scratch& scratch,
                               std::span<const double> sums) {
  const auto is_lost = [](double sum) { return !std::isfinite(sum); };
  if (std::none_of(sums.begin(), sums.end(), is_lost)) return 0;
  std::vector<double> zeros(sums.size());
  add(inputs, tensor, block, false, scratch, zeros.data(), false);
  uint64_t count = 0;
  for (size_t i = 0; i < sums.size(); ++i) count += is_lost(sums[i]) && zeros[i] == 0 ? 1 : 0;
  return count;
}

void Sums::read_input(size_t input, size_t tensor, const TensorView& block, bool counted) {
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
  file::Reader reader(catalog, {{&block, &stored, sum}});
  while (!reader.part().last) continue;
  if (sum) std::atomic_ref(crcs_[place(input, tensor)]).fetch_xor(reader.sums()[0]);
}

void Sums::check(Group& group, std::chrono::milliseconds timeout, const std::vector<bool>& read_once,
                 std::string_view then) {
  if (checked_.exchange(true)) return;
  constexpr size_t kTogether = size_t{64} << 10;  // numbers in a round
  const auto join = [&](std::vector<uint64_t>& numbers, Group::Op op) {
    for (size_t i = 0; i < numbers.size(); i += kTogether) {
      const auto some = std::span(numbers).subspan(i, std::min(kTogether, numbers.size() - i));
      group.all_reduce(some, op, base::after(timeout));
    }
  };
  if (verify_) join(crcs_, Group::Op::kXor);
  join(too_large_, Group::Op::kSum);
  if (verify_) check_bytes(read_once, then);
  check_sizes(then);
}

void Sums::check_bytes(const std::vector<bool>& read_once, std::string_view then) const {
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

void Sums::check_sizes(std::string_view then) const {
  std::vector<std::string> wrong;
  for (size_t t = 0; t < too_large_.size(); ++t) {
    if (too_large_[t] > 0) wrong.push_back(fmt::format("{} of '{}'", too_large_[t], plan_.tensors()[t].name));
  }
  if (!wrong.empty())
    base::fail(Code::kInvalidArgument,
               "sums that are numbers are beyond the largest of their dtype, and would be infinite in it: {}; choose a "
               "dtype with a wider "
               "range (float32, or bfloat16 for float16), or smaller weights{}",
               file::listed(wrong), then);
}

}  // namespace shardow::merging
