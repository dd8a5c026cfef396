// A view's elements are contiguous in memory, so rounding to nearest needs cuts only for size. Noise is addressed by
// the element's index in the global tensor, so stochastic rounding also cuts where a run ends, and at multiples of
// 2^32, where the noise's high word changes: a few runs at a time, on the stack, from the region's own description.
#include "average/chunk_table.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "tensor/dtype.h"
#include "tensor/runs.h"

namespace shardow::average {
namespace {

using kernels::Chunk;

/// Returns whether the elements are others than the first ones of their tensor, one after another.
bool jumps(const Region& region) {
  RunCursor cursor(region);
  const std::optional<Run> first = cursor.next();
  return first && (first->global_begin != 0 || first->length != region.size());
}

int64_t num_chunks(const TensorView& view, int64_t chunk_elements) {
  return (view.region.size() + chunk_elements - 1) / chunk_elements;
}

}  // namespace

uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::vector<Chunk> make_chunks(std::span<const TensorView> parameters,
                               std::span<const std::vector<TensorView>> averages, int64_t chunk_elements) {
  std::vector<Chunk> chunks;
  int64_t count = 0;
  for (const TensorView& parameter : parameters) count += num_chunks(parameter, chunk_elements);
  chunks.reserve(static_cast<size_t>(count));
  for (size_t i = 0; i < parameters.size(); ++i) {
    Chunk chunk{};
    chunk.tensor = hash_name(parameters[i].name);
    chunk.parameter_dtype = parameters[i].dtype;
    chunk.average_dtype = averages[0][i].dtype;
    const int64_t size = parameters[i].region.size();
    for (int64_t begin = 0; begin < size; begin += chunk_elements) {
      chunk.parameter = data_at(parameters[i], begin);
      for (size_t k = 0; k < averages.size(); ++k) chunk.averages[k] = data_at(averages[k][i], begin);
      chunk.count = std::min(chunk_elements, size - begin);
      chunk.global_begin = begin;
      chunks.push_back(chunk);
    }
  }
  return chunks;
}

/// Collects pieces for one call of the kernel, which costs little for each then. A slot that last held a piece of the
/// same chunk needs new addresses and counts only.
class RunCutter::Batch {
 public:
  explicit Batch(const std::function<void(Pieces)>& fn) : fn_(fn) {}
  ~Batch() { flush(); }

  void begin(const Chunk& chunk) {
    chunk_ = &chunk;
    parameter_size_ = byte_size(chunk.parameter_dtype, 1);
    average_size_ = byte_size(chunk.average_dtype, 1);
    num_averages_ =
        static_cast<size_t>(std::find(chunk.averages.begin(), chunk.averages.end(), nullptr) - chunk.averages.begin());
  }

  /// Adds elements [begin, begin + count) of the chunk, the first of which has this global index.
  void add(int64_t begin, int64_t count, int64_t global) {
    Chunk& piece = pieces_[count_];
    if (of_[count_] != chunk_) {
      piece = *chunk_;
      of_[count_] = chunk_;
    }
    piece.parameter = static_cast<const std::byte*>(chunk_->parameter) + begin * parameter_size_;
    for (size_t k = 0; k < num_averages_; ++k)
      piece.averages[k] = static_cast<std::byte*>(chunk_->averages[k]) + begin * average_size_;
    piece.count = count;
    piece.global_begin = global;
    if (++count_ == pieces_.size()) flush();
  }

 private:
  static constexpr size_t kPieces = 64;

  void flush() {
    if (count_ > 0) fn_({pieces_.data(), count_});
    count_ = 0;
  }

  const std::function<void(Pieces)>& fn_;
  const Chunk* chunk_ = nullptr;
  int64_t parameter_size_ = 0, average_size_ = 0;
  size_t num_averages_ = 0;
  std::array<Chunk, kPieces> pieces_;
  std::array<const Chunk*, kPieces> of_{};  // the chunk of each piece
  size_t count_ = 0;
};

RunCutter::RunCutter(std::span<const TensorView> parameters, int64_t chunk_elements) : chunk_elements_(chunk_elements) {
  if (std::none_of(parameters.begin(), parameters.end(), [](const TensorView& view) { return jumps(view.region); }))
    return;
  size_t first = 0;
  regions_.reserve(parameters.size());
  firsts_.reserve(parameters.size());
  for (const TensorView& view : parameters) {
    regions_.push_back(view.region);
    firsts_.push_back(first);
    first += static_cast<size_t>(num_chunks(view, chunk_elements));
  }
}

size_t RunCutter::bytes() const noexcept {
  return regions_.size() * (sizeof(Region) + sizeof(size_t));
}

void RunCutter::for_each(std::span<const Chunk> table, size_t begin, size_t end,
                         const std::function<void(Pieces)>& fn) const {
  Batch batch(fn);
  // The last view that begins at or before the chunk: views without elements have no chunks of their own.
  auto view = static_cast<size_t>(std::upper_bound(firsts_.begin(), firsts_.end(), begin) - firsts_.begin()) - 1;
  for (size_t c = begin; c < end; ++c) {
    while (view + 1 < firsts_.size() && firsts_[view + 1] <= c) ++view;
    batch.begin(table[c]);
    const int64_t local = static_cast<int64_t>(c - firsts_[view]) * chunk_elements_;
    const Region region = regions_[view].window(local, local + table[c].count);
    region.for_each_run([&](const Run& run) {
      for (int64_t done = 0; done < run.length;) {
        const int64_t global = run.global_begin + done;
        const int64_t count = std::min(run.length - done, (int64_t{1} << 32) - (global & 0xffffffff));
        batch.add(run.local_begin + done, count, global);
        done += count;
      }
    });
  }
}

std::vector<Chunk> make_runs(const RunCutter& cutter, std::span<const Chunk> table) {
  size_t count = 0;
  cutter.for_each(table, 0, table.size(), [&](std::span<const Chunk> pieces) { count += pieces.size(); });
  std::vector<Chunk> runs;
  runs.reserve(count);
  cutter.for_each(table, 0, table.size(),
                  [&](std::span<const Chunk> pieces) { runs.insert(runs.end(), pieces.begin(), pieces.end()); });
  return runs;
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
    while (part < static_cast<size_t>(parts) &&
           2 * seen + chunks[i].count > 2 * (total * static_cast<int64_t>(part) / parts)) {
      bounds[part++] = i;
    }
    seen += chunks[i].count;
  }
  return bounds;
}

}  // namespace shardow::average
