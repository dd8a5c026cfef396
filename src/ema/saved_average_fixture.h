// For tests of Averages in files: ranks as threads, each with its rows of a model that any number of them trains alike.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "average/average_fixture.h"
#include "base/folder_fixture.h"
#include "ema/names.h"
#include "shardow/ema_file.h"

namespace shardow {

inline const std::vector<Schedule> kOne = {Schedule::warmup(0.999)},
                                   kTwo = {Schedule::constant(0.5), Schedule::constant(0.99)};

/// A rank's rows of one weight, and all of a second one, whose values no sharding changes; averaged.
struct Rank {
  int64_t first;
  OwnTensor rows, whole;
  Average ema;

  Rank(int rank, int size, std::vector<Schedule> schedules)
      : first(kRows * rank / size),
        rows("rows", Region::grid({kRows, kColumns}, {{{first, kRows * (rank + 1) / size}}, {{0, kColumns}}}), 1),
        whole("whole", {5}, 1),
        ema(weights_at(-1), {.schedules = std::move(schedules)}) {}

  void train(int begin, int end) {
    for (int step = begin; step < end; ++step) {
      weights_at(step);
      ema.update();
    }
  }
  std::vector<TensorView> weights_at(int step) {
    int64_t at = first * kColumns;
    for (float& value : rows.values)
      value = static_cast<float>(at++ % 97) * 0.37f - static_cast<float>(step * step) * 0.11f;
    for (float& value : whole.values) value = static_cast<float>(step) * 1.25f;
    return {rows.view, whole.view};
  }
};

class SavedAverage : public InFolder {
 protected:
  /// body(group) on every rank; what each threw.
  static std::vector<std::string> on_ranks(int size, const std::function<void(Group&)>& body) {
    auto groups = threads(size);
    std::vector<std::string> said(groups.size());
    std::vector<std::jthread> ranks;
    for (auto& group : groups) {
      ranks.emplace_back([&] {
        try {
          body(*group);
        } catch (const std::exception& error) {
          said[static_cast<size_t>(group->rank())] = error.what();
        }
      });
    }
    ranks.clear();
    return said;
  }
  static std::vector<std::string> fine(int size) { return std::vector<std::string>(static_cast<size_t>(size)); }

  void save_by(int size, const std::vector<Schedule>& schedules, const fs::path& path, int steps) {
    EXPECT_EQ(on_ranks(size,
                       [&](Group& group) {
                         Rank rank(group.rank(), size, schedules);
                         rank.train(0, steps);
                         save(group, rank.ema, path);
                       }),
              fine(size));
  }
};

}  // namespace shardow
