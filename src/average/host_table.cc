#include "average/host_table.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

namespace shardow::average {

using kernels::Chunk;

namespace {

/// Parts with fewer elements have one thread. Passes follow one another, so that a thread which has just worked need
/// not be woken.
constexpr int64_t kSerialPassElements = 1 << 18;

}  // namespace

HostTable::HostTable(std::vector<Chunk> chunks, RunCutter runs, size_t num_averages, base::ThreadPool& pool,
                     std::span<const size_t> begins)
    : chunks_(std::move(chunks)),
      runs_(std::move(runs)),
      num_averages_(num_averages),
      pool_(pool),
      counts_(static_cast<size_t>(pool.size())) {
  for (size_t part = 0; part < begins.size(); ++part) {
    const size_t begin = begins[part], end = part + 1 < begins.size() ? begins[part + 1] : chunks_.size();
    const std::span<const Chunk> some = std::span(chunks_).subspan(begin, end - begin);
    int64_t elements = 0;
    for (const Chunk& chunk : some) elements += chunk.count;
    parts_.emplace_back(some, elements < kSerialPassElements ? 1 : pool.size(), begin);
  }
}

/// Calls fn(thread, block) for every block, on all threads.
template <typename Fn>
void HostTable::for_each_block(size_t part, const Fn& fn) {
  WorkShares& shares = parts_[part];
  shares.begin();
  const auto take_all = [&](int thread) {
    while (const std::optional<ChunkRange> block = shares.take(thread)) fn(thread, *block);
  };
  if (shares.num_threads() == 1) return take_all(0);
  pool_.run(take_all);
}

NonFiniteCount HostTable::update(size_t part, const kernels::Step& step, bool by_runs) {
  std::fill(counts_.begin(), counts_.end(), NonFiniteCount{});
  for_each_block(part, [&](int thread, ChunkRange block) {
    NonFiniteCount met;
    const auto run = [&](std::span<const Chunk> some) { met.add(kernels::cpu::update(some, step), some); };
    if (by_runs && runs_.cuts()) {
      runs_.for_each(chunks_, block.begin, block.end, std::ref(run));
    } else {
      run(std::span(chunks_).subspan(block.begin, block.end - block.begin));
    }
    met.block = block.begin;
    counts_[static_cast<size_t>(thread)].add(met);
  });
  NonFiniteCount total;
  for (const NonFiniteCount& count : counts_) total.add(count);
  return total;
}

void HostTable::copy_parameters(size_t part) {
  for_each_block(part, [&](int, ChunkRange block) {
    for (size_t k = 0; k < num_averages_; ++k) {
      for (size_t c = block.begin; c < block.end; ++c) {
        const Chunk& chunk = chunks_[c];
        kernels::cpu::cast(chunk.parameter, chunk.parameter_dtype, chunk.averages[k], chunk.average_dtype, chunk.count);
      }
    }
  });
}

int64_t HostTable::bytes() const noexcept {
  size_t bytes = chunks_.capacity() * sizeof(Chunk) + runs_.bytes();
  for (const WorkShares& part : parts_) bytes += sizeof(WorkShares) + part.bytes();
  return static_cast<int64_t>(bytes);
}

}  // namespace shardow::average
