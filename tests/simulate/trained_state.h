// The model of a simulated training: its weights are a known function of the step, its averages what an Average makes
// of them, so a file tells of which step it is, and a mixture of two is neither.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "seams.h"
#include "shardow/average.h"

namespace shardow::simulated {

inline const std::vector<Spec> kTrained = {
    {"a", DType::kF32, {7, 30}}, {"b", DType::kBF16, {5, 3}}, {"c", DType::kF64, {}}};

/// What a checkpoint has, of all tensors; the state of an EMA's.
struct Content {
  std::vector<std::vector<std::byte>> tensors;
  std::string state = {};
  bool operator==(const Content&) const = default;
};

struct Job {
  int ranks = 1;
  size_t sharding = 0;    ///< of kShardings
  bool replicas = false;  ///< all hold all, and divide the averages
  bool overlap = false;   ///< updates in the background
  int schedules = 1;
};

/// As one rank has it.
class Model {
 public:
  Model(const Job& job, int rank, int ranks, Group* group);

  void train();  ///< a step of the optimizer, and of the averages
  std::vector<TensorView> weights() { return views_of(held_); }
  Average& average() { return *average_; }

  /// Of a rank that has all.
  Content weights_now();
  Content averages_now();

  /// What differs from `whole`, by name; "" where nothing does.
  std::string differs(const Content& weights, const Content& averages);

 private:
  void fill();

  std::vector<Held> held_;
  std::unique_ptr<Average> average_;
  int step_ = 0;
};

/// Of weights, or of an EMA with so many schedules; throws what opening and reading do.
Content content_of(const std::filesystem::path& path, int schedules);

}  // namespace shardow::simulated
