// Ranks that hold the same views, as threads.
#include <thread>

#include "average/average_fixture.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Average, ReplicasDivideTheWorkAndSwapWhole) {
  constexpr int kMost = 8;
  for (int ranks = 1; ranks <= kMost; ++ranks) {
    OwnTensor start("p", {kRows, kColumns}, 1), dense_p("p", {kRows, kColumns}, 1);
    Average dense(std::vector{dense_p.view}, with_decay(0.9));
    dense_p.fill(2);
    dense.update();
    auto groups = threads(ranks);
    std::vector<std::unique_ptr<OwnTensor>> local;
    for (int rank = 0; rank < ranks; ++rank)
      local.push_back(std::make_unique<OwnTensor>("p", Shape{kRows, kColumns}, 1));
    std::vector<int64_t> elements(static_cast<size_t>(ranks));
    std::vector<std::vector<float>> inside(static_cast<size_t>(ranks));
    std::vector<std::thread> workers;
    for (int rank = 0; rank < ranks; ++rank) {
      workers.emplace_back([&, rank] {
        const auto at = static_cast<size_t>(rank);
        AverageOptions options = with_decay(0.9);
        options.replicas = groups[at].get();
        Average ema(std::vector{local[at]->view}, options);
        local[at]->fill(2);
        ema.update();
        elements[at] = ema.stats().elements;
        ema.swap_in();
        inside[at] = local[at]->values;
        ema.swap_out();
      });
    }
    for (std::thread& worker : workers) worker.join();
    int64_t total = 0;
    for (size_t rank = 0; rank < static_cast<size_t>(ranks); ++rank) {
      EXPECT_EQ(inside[rank], copy_of(dense.views()[0]));
      EXPECT_EQ(local[rank]->values, dense_p.values);
      EXPECT_LE(elements[rank], kRows * kColumns / ranks + 16);
      total += elements[rank];
    }
    EXPECT_EQ(total, kRows * kColumns);
  }
}

}  // namespace
}  // namespace shardow
