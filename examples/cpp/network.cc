#include "network.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <string_view>

namespace {

constexpr int kPixels = 64, kDigits = 10;

float input(const Sample& sample, size_t pixel) {
  return static_cast<float>(sample.pixels[pixel]) / 8 - 1;
}

void descend(Rows& tensor, const std::vector<float>& gradient, float rate) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    tensor.momentum[i] = 0.9f * tensor.momentum[i] + gradient[i];
    tensor.values[i] -= rate * tensor.momentum[i];
  }
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
  const int64_t begin = kDigits * group.rank() / group.size(), end = kDigits * (group.rank() + 1) / group.size();
  const std::vector<float> weight(static_cast<size_t>((end - begin) * kPixels)), bias(static_cast<size_t>(end - begin));
  tensors_ = {{"weight", kDigits, kPixels, begin, end, weight, weight}, {"bias", kDigits, 1, begin, end, bias, bias}};
}

/// (kDigits, count): each rank computes its rows, and all gather them by rank.
std::vector<float> Network::outputs(const Sample* samples, int count) const {
  const Rows &weight = tensors_[0], &bias = tensors_[1];
  std::vector<float> own;
  for (size_t row = 0; row < bias.values.size(); ++row) {
    for (int n = 0; n < count; ++n) {
      float sum = bias.values[row];
      for (size_t i = 0; i < kPixels; ++i) sum += weight.values[row * kPixels + i] * input(samples[n], i);
      own.push_back(sum);
    }
  }
  const std::string_view bytes(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(float));
  std::vector<float> all(static_cast<size_t>(kDigits * count));
  char* to = reinterpret_cast<char*>(all.data());
  for (const std::string& rows : group_.all_gather(bytes, std::chrono::steady_clock::now() + std::chrono::minutes(1)))
    to = std::copy(rows.begin(), rows.end(), to);
  return all;
}

void Network::train(const Sample* samples, int count, float rate) {
  Rows &weight = tensors_[0], &bias = tensors_[1];
  std::vector<float> of_weight(weight.values.size()), of_bias(bias.values.size());
  const std::vector<float> all = outputs(samples, count);
  for (int n = 0; n < count; ++n) {
    const auto output = [&](int64_t digit) { return all[static_cast<size_t>(digit * count + n)]; };
    float sum = 0;
    for (int digit = 0; digit < kDigits; ++digit) sum += std::exp(output(digit));
    for (int64_t digit = bias.begin; digit < bias.end; ++digit) {  // softmax, less the truth
      const float error = (std::exp(output(digit)) / sum - (digit == samples[n].label)) / static_cast<float>(count);
      const auto row = static_cast<size_t>(digit - bias.begin);
      of_bias[row] += error;
      for (size_t i = 0; i < kPixels; ++i) of_weight[row * kPixels + i] += error * input(samples[n], i);
    }
  }
  descend(weight, of_weight, rate);
  descend(bias, of_bias, rate);
}

double Network::accuracy(const Sample* samples, int count) const {
  const std::vector<float> all = outputs(samples, count);
  int right = 0;
  for (int n = 0; n < count; ++n) {
    const auto output = [&](int digit) { return all[static_cast<size_t>(digit * count + n)]; };
    int best = 0;
    for (int digit = 1; digit < kDigits; ++digit) {
      if (output(digit) > output(best)) best = digit;
    }
    right += best == samples[n].label;
  }
  return static_cast<double>(right) / count;
}
