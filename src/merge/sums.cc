#include "merge/sums.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "base/errors.h"
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

}  // namespace

/// One thread's.
struct Sums::Scratch {
  std::unique_ptr<double[]> sums = std::make_unique_for_overwrite<double[]>(static_cast<size_t>(2 * kBlock));
  std::unique_ptr<std::byte[]> terms = std::make_unique_for_overwrite<std::byte[]>(kernels::kMostTerms * kBlockBytes);
};

Sums::Sums(const Plan& plan) : plan_(plan), crcs_(plan.inputs().size() * plan.tensors().size(), 0) {}

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

void Sums::read(const TensorView& wanted, bool summed) {
  const size_t t = *plan_.find(wanted.name);
  const Tensor& tensor = plan_.tensors()[t];
  if (!tensor.averaged) return read_input(plan_.inputs().size() - 1, t, wanted, summed);
  std::unique_ptr<Scratch> scratch = take();
  auto* to = static_cast<std::byte*>(wanted.data);
  for (int64_t begin = 0; begin < wanted.region.size(); begin += kBlock) {
    const int64_t end = std::min(wanted.region.size(), begin + kBlock);
    const Region block = wanted.region.window(begin, end);
    for (size_t j = 0; j < plan_.inputs().size();) {
      const DType dtype = tensor.types[j];
      const bool first = j == 0;
      std::array<kernels::Term, kernels::kMostTerms> terms{};
      size_t count = 0;
      for (; count < terms.size() && j < plan_.inputs().size() && tensor.types[j] == dtype; ++j, ++count) {
        std::byte* const data = scratch->terms.get() + count * kBlockBytes;
        read_input(j, t, {wanted.name, dtype, block, data}, summed);
        terms[count] = {data, plan_.inputs()[j].coefficient};
      }
      kernels::cpu::add_terms(std::span(terms).first(count), part_of(dtype), first, scratch->sums.get(), parts(dtype, end - begin));
    }
    kernels::cpu::round_sums(scratch->sums.get(), to, part_of(wanted.dtype), parts(wanted.dtype, end - begin));
    to += (end - begin) * dtype_bits(wanted.dtype) / 8;
  }
  give_back(std::move(scratch));
}

void Sums::read_input(size_t input, size_t tensor, const TensorView& block, bool summed) {
  bytes_read_ += block.region.size() * dtype_bits(block.dtype) / 8;
  const MergeInput& from = plan_.inputs()[input];
  if (const auto* const source = std::get_if<1>(&from.tensors)) return (*source)->read(block);
  const file::Catalog& catalog = std::get<Checkpoint>(from.tensors).catalog();
  const file::Stored& stored = catalog.find(block.name);
  const bool sum = summed && stored.crc && !checked_;
  file::Reader reader(catalog, {{&block, &stored, sum}});
  while (!reader.part().last) continue;
  if (sum) std::atomic_ref(crcs_[place(input, tensor)]).fetch_xor(reader.sums()[0]);
}

void Sums::check(Group& group, std::chrono::milliseconds timeout, const std::vector<bool>& read_once) {
  if (checked_.exchange(true)) return;
  constexpr size_t kTogether = size_t{64} << 10;  // numbers in a round
  for (size_t i = 0; i < crcs_.size(); i += kTogether) {
    const auto some = std::span(crcs_).subspan(i, std::min(kTogether, crcs_.size() - i));
    group.all_reduce(some, Group::Op::kXor, std::chrono::steady_clock::now() + timeout);
  }
  std::vector<std::string> wrong;
  for (size_t j = 0; j < plan_.inputs().size(); ++j) {
    const MergeInput& input = plan_.inputs()[j];
    const auto* const opened = std::get_if<Checkpoint>(&input.tensors);
    for (size_t t = 0; opened != nullptr && t < plan_.tensors().size(); ++t) {
      const Tensor& tensor = plan_.tensors()[t];
      if (!read_once[t] || (!tensor.averaged && j + 1 < plan_.inputs().size())) continue;
      const auto crc = opened->catalog().find(tensor.name).crc;
      if (crc && *crc != crcs_[place(j, t)]) wrong.push_back(fmt::format("'{}' of {}", tensor.name, input.name));
    }
  }
  if (!wrong.empty())
    base::fail(Code::kCorrupt, "the data of {} is not what was saved (checksums differ): merge without it", file::listed(wrong));
}

}  // namespace shardow::merging
