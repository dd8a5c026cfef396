// A view's elements are contiguous in memory, so rounding to nearest needs cuts only for size. Noise is addressed by the element's index in
// the global tensor, so stochastic rounding also cuts where a run ends, and at multiples of 2^32, where the noise's high word changes.
#include "average/plan.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using kernels::Chunk;

/// FNV-1a (Fowler, Noll, Vo): spreads names, so that equal positions of two tensors draw different noise.
uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

class Builder {
 public:
  Builder(const TensorView& parameter, std::span<const std::vector<TensorView>> averages, size_t index, std::vector<Chunk>& out)
      : averages_(averages), index_(index), parameter_(parameter), tensor_(hash_name(parameter.name)), out_(out) {}

  /// Chunks for elements [local, local + length) of the view, whose first has this global index.
  void add(int64_t global, int64_t local, int64_t length) {
    while (length > 0) {
      const int64_t to_cut = kChunkElements - local % kChunkElements;
      const int64_t to_high_word = (int64_t{1} << 32) - (global & 0xffffffff);
      const int64_t count = std::min({length, to_cut, to_high_word});
      out_.push_back(chunk(global, local, count));
      global += count;
      local += count;
      length -= count;
    }
  }

 private:
  Chunk chunk(int64_t global, int64_t local, int64_t count) const {
    Chunk chunk{};
    chunk.parameter = at(parameter_, local);
    for (size_t k = 0; k < averages_.size(); ++k) chunk.averages[k] = at(averages_[k][index_], local);
    chunk.count = count;
    chunk.global_begin = global;
    chunk.tensor = tensor_;
    chunk.parameter_dtype = parameter_.dtype;
    chunk.average_dtype = averages_[0][index_].dtype;
    return chunk;
  }

  static std::byte* at(const TensorView& view, int64_t element) {
    return static_cast<std::byte*>(view.data) + byte_size(view.dtype, element);
  }

  std::span<const std::vector<TensorView>> averages_;
  size_t index_;
  const TensorView& parameter_;
  uint64_t tensor_;
  std::vector<Chunk>& out_;
};

}  // namespace

std::vector<Chunk> make_chunks(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages, Cut cut) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Builder builder(parameters[i], averages, i, chunks);
    if (cut == Cut::kMemory) {
      builder.add(0, 0, parameters[i].region.size());
    } else {
      parameters[i].region.for_each_run([&](const Run& run) { builder.add(run.global_begin, run.local_begin, run.length); });
    }
  }
  return chunks;
}

bool has_jumps(std::span<const TensorView> parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const TensorView& view) {
    bool differs = false;
    view.region.for_each_run([&](const Run& run) { differs = differs || run.global_begin != run.local_begin; });
    return differs;
  });
}

std::vector<size_t> partition(std::span<const Chunk> chunks, int parts) {
  int64_t total = 0;
  for (const Chunk& chunk : chunks) total += chunk.count;
  std::vector<size_t> bounds(static_cast<size_t>(parts) + 1, chunks.size());
  bounds[0] = 0;
  int64_t seen = 0;
  size_t part = 1;
  for (size_t i = 0; i < chunks.size() && part < static_cast<size_t>(parts); ++i) {
    // A chunk belongs to the share in which its middle falls.
    while (part < static_cast<size_t>(parts) && 2 * seen + chunks[i].count > 2 * (total * static_cast<int64_t>(part) / parts)) {
      bounds[part++] = i;
    }
    seen += chunks[i].count;
  }
  return bounds;
}

}  // namespace shardow::average
