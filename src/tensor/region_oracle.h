// For tests: regions the slow way. Elements are listed one by one, and a mesh is cut by the rule that torch follows, so that a test
// compares the two.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "shardow/region.h"

namespace shardow::oracle {

using Random = std::mt19937_64;
using Dims = std::vector<std::vector<Interval>>;

inline int64_t pick(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

/// The global indices of the grid's elements, in local order.
inline std::vector<int64_t> elements(const Shape& shape, const Dims& dims) {
  std::vector<int64_t> found{0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t outer : found) {
      for (int64_t i = 0; i < shape[d]; ++i) {
        const bool held = std::any_of(dims[d].begin(), dims[d].end(), [i](Interval v) { return v.begin <= i && i < v.end; });
        if (held) next.push_back(outer * shape[d] + i);
      }
    }
    found = next;
  }
  return found;
}

inline std::vector<int64_t> elements(const Region& region) {
  std::vector<int64_t> found;
  region.for_each_run([&](const Run& run) {
    for (int64_t i = 0; i < run.length; ++i) found.push_back(run.global_begin + i);
  });
  return found;
}

inline Shape random_shape(Random& random, size_t most_dims, int64_t most) {
  Shape shape(static_cast<size_t>(pick(random, 0, static_cast<int64_t>(most_dims))));
  for (int64_t& size : shape) size = pick(random, pick(random, 0, 9) == 0 ? 0 : 1, most);
  return shape;
}

/// Sorted disjoint intervals, some touching, some empty, sometimes none.
inline Dims random_dims(Random& random, const Shape& shape) {
  Dims dims;
  for (const int64_t size : shape) {
    auto& list = dims.emplace_back();
    if (pick(random, 0, 2) == 0) {
      list.push_back({0, size});
      continue;
    }
    for (int64_t at = pick(random, 0, size); at < size; at += pick(random, 0, 2)) {
      const int64_t end = pick(random, at, size);
      list.push_back({at, end});
      at = std::max(end, at + (end == at));
    }
  }
  return dims;
}

/// A random region with its elements listed by the oracle.
struct Sample {
  Region region;
  Dims dims;
  std::vector<int64_t> elements;
};

inline Sample random_sample(Random& random, bool windowed) {
  const Shape shape = random_shape(random, 4, 7);
  Dims dims = random_dims(random, shape);
  Sample sample{Region::grid(shape, dims), dims, elements(shape, dims)};
  if (windowed) {
    const auto n = static_cast<int64_t>(sample.elements.size());
    const int64_t begin = pick(random, 0, n), end = pick(random, begin, n);
    sample.region = sample.region.window(begin, end);
    sample.elements = {sample.elements.begin() + begin, sample.elements.begin() + end};
  }
  return sample;
}

/// A dimension of a mesh: how many ranks, and what torch's placement does along it.
struct Placement {
  int64_t ranks;
  int dim = -1;              ///< the tensor's dimension that is cut; -1: Replicate
  int64_t split_factor = 1;  ///< above 1: _StridedShard
};

/// Part i of torch.chunk(k) over a list of intervals.
inline std::vector<Interval> cut(const std::vector<Interval>& intervals, int64_t k, int64_t i) {
  int64_t n = 0;
  for (const auto& [begin, end] : intervals) n += end - begin;
  const int64_t chunk = (n + k - 1) / k, low = std::min(n, chunk * i), high = std::min(n, chunk * (i + 1));
  std::vector<Interval> result;
  int64_t at = 0;
  for (const auto& [begin, end] : intervals) {
    const int64_t from = std::max(low - at, int64_t{0}), to = std::min(high - at, end - begin);
    if (from < to) result.push_back({begin + from, begin + to});
    at += end - begin;
  }
  return result;
}

/// What the rank at `me` holds. A strided shard is applied after the later mesh dimensions that cut the same tensor dimension,
/// `split_factor` ranks in all.
inline Dims sharded(const Shape& shape, const std::vector<Placement>& mesh, const std::vector<int64_t>& me) {
  struct Late {
    size_t mesh_dim;
    int dim;
    int64_t factor;
  };
  Dims dims;
  for (const int64_t size : shape) dims.push_back({{0, size}});
  std::vector<Late> late;
  const auto apply = [&](size_t m, int dim) {
    auto& list = dims[static_cast<size_t>(dim)];
    list = cut(list, mesh[m].ranks, me[m]);
    for (Late& w : late) {
      if (w.dim == dim) w.factor /= mesh[m].ranks;
    }
  };
  for (size_t m = 0; m < mesh.size(); ++m) {
    if (mesh[m].dim < 0) continue;
    if (mesh[m].split_factor > 1) {
      late.push_back({m, mesh[m].dim, mesh[m].split_factor});
    } else {
      apply(m, mesh[m].dim);
    }
    for (auto done = late.begin();
         (done = std::find_if(late.begin(), late.end(), [](const Late& w) { return w.factor == 1; })) != late.end();) {
      const Late now = *done;
      late.erase(done);
      apply(now.mesh_dim, now.dim);
    }
  }
  return dims;
}

/// Every coordinate of the mesh, the last dimension fastest. `replicas`: all of them, or only the first of each.
inline std::vector<std::vector<int64_t>> coordinates(const std::vector<Placement>& mesh, bool replicas) {
  std::vector<std::vector<int64_t>> all{{}};
  for (const Placement& placement : mesh) {
    std::vector<std::vector<int64_t>> next;
    for (const auto& prefix : all) {
      for (int64_t i = 0; i < (placement.dim < 0 && !replicas ? 1 : placement.ranks); ++i) {
        next.push_back(prefix);
        next.back().push_back(i);
      }
    }
    all = next;
  }
  return all;
}

}  // namespace shardow::oracle
