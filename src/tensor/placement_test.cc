// Against an oracle that cuts lists of indices, in an order that is drawn first and put into placements afterwards.
#include "shardow/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/errors.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow {
namespace {

using oracle::pick;
using oracle::Random;
using Indices = std::vector<int64_t>;

/// torch.chunk(count)[index], which has fewer chunks than `count` where those before took all.
Indices chunk(const Indices& held, int64_t count, int64_t index) {
  std::vector<Indices> chunks(1);
  const int64_t each = (static_cast<int64_t>(held.size()) + count - 1) / count;
  for (const int64_t i : held) {
    if (static_cast<int64_t>(chunks.back().size()) == each) chunks.emplace_back();
    chunks.back().push_back(i);
  }
  return index < static_cast<int64_t>(chunks.size()) ? chunks[static_cast<size_t>(index)] : Indices{};
}

/// The cross product of each dimension's indices, as elements of the tensor.
Indices elements(const Shape& shape, const std::vector<Indices>& dims) {
  Indices found{0};
  for (size_t d = 0; d < shape.size(); ++d) {
    Indices next;
    for (const int64_t outer : found) {
      for (const int64_t i : dims[d]) next.push_back(outer * shape[d] + i);
    }
    found = next;
  }
  return found;
}

/// Mesh dimensions, what each cuts (-1: nothing), and the order in which they do: what placements have to say.
struct Cuts {
  std::vector<int64_t> ranks;
  std::vector<int> dims;
  std::vector<size_t> order;
};

Cuts random_cuts(Random& random, size_t num_dims) {
  Cuts cuts;
  for (int64_t count = pick(random, 0, 4); count > 0; --count) {
    cuts.order.push_back(cuts.ranks.size());
    cuts.ranks.push_back(pick(random, 2, 3));
    cuts.dims.push_back(static_cast<int>(pick(random, -1, static_cast<int64_t>(num_dims) - 1)));
  }
  std::shuffle(cuts.order.begin(), cuts.order.end(), random);
  return cuts;
}

/// A shard waits for the later mesh dimensions that cut its dimension before it; so every order can be said.
std::vector<Placement> placements(const Cuts& cuts) {
  std::vector<Placement> said(cuts.ranks.size());
  for (size_t at = 0; at < cuts.order.size(); ++at) {
    const size_t m = cuts.order[at];
    if (cuts.dims[m] < 0) continue;
    int64_t factor = 1;
    for (size_t before = 0; before < at; ++before) {
      const size_t other = cuts.order[before];
      if (other > m && cuts.dims[other] == cuts.dims[m]) factor *= cuts.ranks[other];
    }
    said[m] = Placement::shard(cuts.dims[m], factor);
  }
  return said;
}

TEST(Placement, HoldsWhatChunkingIndicesInTheSameOrderHolds) {
  Random random(21);
  int strided = 0;
  for (int i = 0; i < 4000; ++i) {
    const Shape shape = oracle::random_shape(random, 3, 13);
    const Cuts cuts = random_cuts(random, shape.size());
    const std::vector<Placement> said = placements(cuts);
    strided += std::any_of(said.begin(), said.end(), [](const Placement& one) { return one.split_factor > 1; });
    std::vector<MeshDim> mesh;
    for (const int64_t ranks : cuts.ranks) mesh.push_back({ranks, pick(random, 0, ranks - 1)});
    std::vector<Indices> dims(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) {
      dims[d].resize(static_cast<size_t>(shape[d]));
      std::iota(dims[d].begin(), dims[d].end(), 0);
    }
    for (const size_t m : cuts.order) {
      if (cuts.dims[m] < 0) continue;
      Indices& held = dims[static_cast<size_t>(cuts.dims[m])];
      held = chunk(held, mesh[m].size, mesh[m].coordinate);
    }
    const Region region = region_of("t", shape, mesh, said);
    ASSERT_EQ(oracle::elements(region), elements(shape, dims)) << region.to_string() << ", case " << i;
    for (size_t d = 0; d < shape.size(); ++d) ASSERT_EQ(region.grid_shape()[d], static_cast<int64_t>(dims[d].size()));
  }
  EXPECT_GT(strided, 400) << "both kinds of shards must occur";
}

TEST(Placement, CutsAsTorchChunk) {
  const auto sizes = [](int64_t rows, int64_t ranks) {
    Indices found;
    for (int64_t i = 0; i < ranks; ++i)
      found.push_back(oracle::sharded({rows}, {{ranks, Placement::shard(0)}}, {i}).size());
    return found;
  };
  EXPECT_EQ(sizes(7, 4), (Indices{2, 2, 2, 1}));  // as measured
  EXPECT_EQ(sizes(5, 4), (Indices{2, 2, 1, 0}));
  EXPECT_EQ(sizes(0, 2), (Indices{0, 0}));
}

TEST(Placement, FullyShardUnderTensorParallelism) {
  const std::vector<oracle::Placed> mesh = {{2, Placement::shard(0, 2)},
                                            {2, Placement::shard(0)}};  // 9 rows: tp has 5 and 4 of them
  EXPECT_EQ(oracle::sharded({9}, mesh, {0, 0}).to_string(), "[9] at [0:3]");
  EXPECT_EQ(oracle::sharded({9}, mesh, {1, 0}).to_string(), "[9] at [3:5]");
  EXPECT_EQ(oracle::sharded({9}, mesh, {0, 1}).to_string(), "[9] at [5:7]");
  EXPECT_EQ(oracle::sharded({9}, mesh, {1, 1}).to_string(), "[9] at [7:9]");
}

TEST(Placement, CountsDimensionsFromTheEndToo) {
  EXPECT_EQ(oracle::sharded({4, 6}, {{3, Placement::shard(-1)}}, {1}), Region::grid({4, 6}, {{{0, 4}}, {{2, 4}}}));
}

TEST(Placement, OfHugeTensorsDoesNotWrap) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Region last = oracle::sharded({kMost}, {{kMost, Placement::shard(0)}}, {kMost - 1});
  EXPECT_EQ(last, Region::whole({kMost}).window(kMost - 1, kMost));
  EXPECT_EQ(oracle::sharded({kMost / 2 + 2}, {{kMost, Placement::shard(0)}}, {kMost - 1}).size(), 0);
}

TEST(Placement, RefusesWhatNoWeightHas) {
  struct Case {
    std::vector<oracle::Placed> mesh;
    Code code;
    const char* message;
  };
  const Case cases[] = {
      {{{2, Placement::partial()}},
       Code::kUnsupported,
       "'t' has a partial placement, which no weight has; average it when it is reduced"},
      {{{2, Placement::shard(0, 2)}, {2}},
       Code::kUnsupported,
       "'t' has a strided shard of dimension 0 whose split factor later mesh dimensions don't make up (2 is left); "
       "only views of sharded "
       "tensors have that"},
      {{{2, Placement::shard(0, 2)}, {2, Placement::shard(1)}}, Code::kUnsupported, nullptr},
      {{{2, Placement::shard(0, 3)}, {2, Placement::shard(0)}}, Code::kUnsupported, nullptr},
      {{{2, Placement::shard(2)}}, Code::kInvalidArgument, "'t' is sharded along dimension 2; it has 2"},
      {{{2, Placement::shard(-3)}}, Code::kInvalidArgument, "'t' is sharded along dimension -3; it has 2"},
      {{{2, Placement::shard(0, 0)}}, Code::kInvalidArgument, "'t' has a split factor of 0"},
  };
  for (const Case& c : cases) {
    try {
      oracle::sharded({8, 8}, c.mesh, std::vector<int64_t>(c.mesh.size()));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), c.code) << error.what();
      if (c.message != nullptr) {
        EXPECT_STREQ(error.what(), c.message);
      }
    }
  }
}

TEST(Placement, RefusesAMeshThatIsNone) {
  const Placement shard[] = {Placement::shard(0)};
  for (const MeshDim dim : {MeshDim{2, 2}, {2, -1}, {0, 0}})
    EXPECT_THROW(region_of("t", {4}, std::vector{dim}, shard), Error);
  EXPECT_THROW(region_of("t", {4}, {}, shard), Error);
}

}  // namespace
}  // namespace shardow
