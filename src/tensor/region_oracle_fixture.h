// For tests: regions the slow way, elements listed one by one; and what all ranks of a mesh hold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "shardow/placement.h"
#include "shardow/region.h"

namespace shardow {
inline constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
}

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
        const bool held =
            std::any_of(dims[d].begin(), dims[d].end(), [i](Interval v) { return v.begin <= i && i < v.end; });
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

/// A dimension of a mesh, and what a placement does along it.
struct Placed {
  int64_t ranks;
  Placement placement = Placement::replicate();
};

/// What the rank at `me` holds.
inline Region sharded(const Shape& shape, const std::vector<Placed>& mesh, const std::vector<int64_t>& me) {
  std::vector<MeshDim> dims;
  std::vector<Placement> placements;
  for (size_t i = 0; i < mesh.size(); ++i) {
    dims.push_back({mesh[i].ranks, me[i]});
    placements.push_back(mesh[i].placement);
  }
  return region_of("t", shape, dims, placements);
}

/// Every coordinate of the mesh, the last dimension fastest. `replicas`: all of them, or only the first of each.
inline std::vector<std::vector<int64_t>> coordinates(const std::vector<Placed>& mesh, bool replicas) {
  std::vector<std::vector<int64_t>> all{{}};
  for (const Placed& dim : mesh) {
    std::vector<std::vector<int64_t>> next;
    for (const auto& prefix : all) {
      const bool one = dim.placement.kind == Placement::Kind::kReplicate && !replicas;
      for (int64_t i = 0; i < (one ? 1 : dim.ranks); ++i) {
        next.push_back(prefix);
        next.back().push_back(i);
      }
    }
    all = next;
  }
  return all;
}

}  // namespace shardow::oracle
