// A network of one layer, each rank with some rows of every tensor: 64 pixels, 10 digits.
//
// A rank computes the digits whose rows it has, for all samples, and gathers what the others computed. So every number
// is computed by one rank, in one order: training is the same, bit for bit, on any number of ranks.
#pragma once

#include <shardow/group.h>

#include <cstdint>
#include <string>
#include <vector>

struct Sample {
  uint8_t pixels[64];
  uint8_t label;
};

std::vector<Sample> read_samples(const std::string& path);

/// Rows [begin, end) of a matrix (rows, columns), in row-major order.
struct Rows {
  std::string name;
  int64_t rows, columns;
  int64_t begin, end;
  std::vector<float> values, momentum;
};

class Network {
 public:
  explicit Network(shardow::Group& group);  ///< `group` outlives it

  /// One step of SGD with momentum. Collective.
  void train(const Sample* samples, int count, float rate);

  /// The share of samples that it gets right. Collective.
  double accuracy(const Sample* samples, int count) const;

  /// The rows of weight and bias that this rank holds. Their memory stays where it is.
  std::vector<Rows>& tensors() { return tensors_; }

 private:
  std::vector<float> outputs(const Sample* samples, int count) const;

  shardow::Group& group_;
  std::vector<Rows> tensors_;
};
