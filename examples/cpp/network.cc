#include "network.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <string_view>

namespace {

constexpr int kPixels = 64, kHidden = 32, kDigits = 10;

std::vector<float> pixels_of(const Sample* samples, int count) {
  std::vector<float> in;
  for (int n = 0; n < count; ++n) {
    for (const uint8_t pixel : samples[n].pixels) in.push_back(static_cast<float>(pixel) / 8 - 1);
  }
  return in;
}

/// The first weights: of no rank, since they depend on the element alone.
float first_value(int64_t element, int64_t columns) {
  uint64_t x = static_cast<uint64_t>(element) * 0x9e3779b97f4a7c15u + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x ^= x >> 31;
  return (static_cast<float>(x >> 40) / 8388608 - 1) / std::sqrt(static_cast<float>(columns));
}

}  // namespace

std::vector<Sample> read_samples(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<Sample> samples(file ? static_cast<size_t>(file.tellg()) / sizeof(Sample) : 0);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(samples.data()), static_cast<std::streamsize>(samples.size() * sizeof(Sample)));
  if (!file || samples.empty()) throw std::runtime_error(path + " is not there, or no file of export.py");
  return samples;
}

Network::Network(shardow::Group& group) : group_(group) {
  const int rank = group.rank(), size = group.size();
  const auto add = [&](const char* name, int64_t rows, int64_t columns) {
    Rows mine{name, rows, columns, rows * rank / size, rows * (rank + 1) / size, {}, {}};
    for (int64_t i = mine.begin * columns; i < mine.end * columns; ++i)
      mine.values.push_back(columns > 1 ? first_value(i, columns) : 0);
    mine.momentum.resize(mine.values.size());
    tensors_.push_back(std::move(mine));
  };
  add("hidden.weight", kHidden, kPixels);
  add("hidden.bias", kHidden, 1);
  add("output.weight", kDigits, kHidden);
  add("output.bias", kDigits, 1);
}

/// Returns the rows of all ranks, by rank, as one matrix: each rank has the rows behind those of the rank before it.
std::vector<float> Network::gather(const std::vector<float>& mine) const {
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(float));
  std::vector<float> all;
  for (const std::string& rows : group_.all_gather(bytes, std::chrono::steady_clock::now() + std::chrono::minutes(1))) {
    const size_t begin = all.size();
    all.resize(begin + rows.size() / sizeof(float));
    std::copy(rows.begin(), rows.end(), reinterpret_cast<char*>(all.data() + begin));
  }
  return all;
}

/// (units, count): each unit's value for each sample. `in` is (count, weight.columns).
std::vector<float> Network::layer(const std::vector<float>& in, int count, const Rows& weight, const Rows& bias,
                                  bool squash) const {
  std::vector<float> mine;
  for (size_t row = 0; row < bias.values.size(); ++row) {
    for (int n = 0; n < count; ++n) {
      float sum = bias.values[row];
      for (int64_t i = 0; i < weight.columns; ++i)
        sum += weight.values[row * static_cast<size_t>(weight.columns) + static_cast<size_t>(i)] *
               in[static_cast<size_t>(n * weight.columns + i)];
      mine.push_back(squash ? std::max(sum, 0.0f) : sum);
    }
  }
  return gather(mine);
}

static std::vector<float> transposed(const std::vector<float>& matrix, int rows, int columns) {
  std::vector<float> out(matrix.size());
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c)
      out[static_cast<size_t>(c * rows + r)] = matrix[static_cast<size_t>(r * columns + c)];
  }
  return out;
}

void Network::train(const Sample* samples, int count, float rate) {
  Rows &hidden_weight = tensors_[0], &hidden_bias = tensors_[1], &output_weight = tensors_[2],
       &output_bias = tensors_[3];
  const std::vector<float> in = pixels_of(samples, count);
  const std::vector<float> hidden = transposed(layer(in, count, hidden_weight, hidden_bias, true), kHidden, count);
  std::vector<float> error = transposed(layer(hidden, count, output_weight, output_bias, false), kDigits, count);
  for (int n = 0; n < count; ++n) {  // softmax, less the truth
    float* const row = &error[static_cast<size_t>(n * kDigits)];
    const float top = *std::max_element(row, row + kDigits);
    float sum = 0;
    for (int d = 0; d < kDigits; ++d) sum += row[d] = std::exp(row[d] - top);
    for (int d = 0; d < kDigits; ++d)
      row[d] = (row[d] / sum - (d == samples[n].label ? 1.0f : 0.0f)) / static_cast<float>(count);
  }
  const std::vector<float> output = gather(output_weight.values);
  std::vector<float> hidden_error(hidden.size());
  for (int n = 0; n < count; ++n) {
    for (int h = 0; h < kHidden; ++h) {
      float sum = 0;
      for (int d = 0; d < kDigits; ++d)
        sum += error[static_cast<size_t>(n * kDigits + d)] * output[static_cast<size_t>(d * kHidden + h)];
      hidden_error[static_cast<size_t>(n * kHidden + h)] = hidden[static_cast<size_t>(n * kHidden + h)] > 0 ? sum : 0;
    }
  }
  const auto descend = [&](Rows& weight, Rows& bias, const std::vector<float>& errors,
                           const std::vector<float>& inputs) {
    std::vector<float> of_weight(weight.values.size()), of_bias(bias.values.size());
    for (int n = 0; n < count; ++n) {
      for (int64_t row = weight.begin; row < weight.end; ++row) {
        const float e = errors[static_cast<size_t>(n * weight.rows + row)];
        of_bias[static_cast<size_t>(row - weight.begin)] += e;
        for (int64_t i = 0; i < weight.columns; ++i)
          of_weight[static_cast<size_t>((row - weight.begin) * weight.columns + i)] +=
              e * inputs[static_cast<size_t>(n * weight.columns + i)];
      }
    }
    step(weight, of_weight, rate);
    step(bias, of_bias, rate);
  };
  descend(output_weight, output_bias, error, hidden);
  descend(hidden_weight, hidden_bias, hidden_error, in);
}

void Network::step(Rows& tensor, const std::vector<float>& gradient, float rate) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    tensor.momentum[i] = 0.9f * tensor.momentum[i] + gradient[i];
    tensor.values[i] -= rate * tensor.momentum[i];
  }
}

double Network::accuracy(const Sample* samples, int count) const {
  const std::vector<float> hidden =
      transposed(layer(pixels_of(samples, count), count, tensors_[0], tensors_[1], true), kHidden, count);
  const std::vector<float> digits = transposed(layer(hidden, count, tensors_[2], tensors_[3], false), kDigits, count);
  int right = 0;
  for (int n = 0; n < count; ++n) {
    const float* const row = &digits[static_cast<size_t>(n * kDigits)];
    right += std::max_element(row, row + kDigits) - row == samples[n].label;
  }
  return static_cast<double>(right) / count;
}
