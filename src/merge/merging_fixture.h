// For tests of merges: checkpoints of random values in any layout, and the sums that they should give.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "file/checkpoint_fixture.h"
#include "kernels/bits.h"
#include "shardow/merge.h"

namespace shardow {

inline double value_of(const std::byte* from, DType dtype) {
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::kF32: return static_cast<double>(read(0.0f));
    case DType::kBF16: return static_cast<double>(kernels::to_float(read(kernels::BF16())));
    case DType::kF16: return static_cast<double>(kernels::to_float(read(kernels::F16())));
    default: return read(0.0);
  }
}

/// Half the distance of neighbouring numbers around x.
inline double half_ulp(double x, DType dtype) {
  const int digits = dtype == DType::kF64 ? 53 : dtype == DType::kF32 ? 24 : dtype == DType::kF16 ? 11 : 8;
  const int least = dtype == DType::kF64 ? -1022 : dtype == DType::kF16 ? -14 : -126;
  const int exponent = x == 0 ? least : std::max(least, std::ilogb(x));
  return std::ldexp(1.0, exponent - digits);
}

class Merging : public Checkpoints {
 protected:
  /// What an input has: bytes of values between -scale and scale, or counts.
  std::vector<Held> random_tensors(const std::vector<Spec>& specs, unsigned seed) const {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal(0.0, 1.0);
    std::vector<Held> held;
    for (const Spec& spec : specs) {
      Held& one = held.emplace_back(spec.name, spec.dtype, Region::whole(spec.shape));
      const auto size = static_cast<size_t>(dtype_bits(spec.dtype) / 8);
      for (size_t at = 0; at < one.memory.size(); at += size) {
        const auto put = [&](auto value) { std::memcpy(one.memory.data() + at, &value, sizeof value); };
        const double x = normal(random) * std::ldexp(1.0, static_cast<int>(random() % 8) - 4);
        switch (spec.dtype) {
          case DType::kF32: put(static_cast<float>(x)); break;
          case DType::kBF16: put(kernels::convert<kernels::BF16>(x)); break;
          case DType::kF16: put(kernels::convert<kernels::F16>(x)); break;
          case DType::kF64: put(x); break;
          default:
            for (size_t i = 0; i < size; ++i) one.memory[at + i] = static_cast<std::byte>(random() % 2);
        }
      }
    }
    return held;
  }

  /// Saves them in `folder_`; a name that ends in .safetensors is one file, another a directory of small ones.
  MergeInput saved(const std::string& name, const std::vector<Spec>& specs, unsigned seed, double coefficient,
                   std::optional<int64_t> step = {}, const SaveOptions& options = {}) const {
    std::vector<Held> held = random_tensors(specs, seed);
    SaveOptions all = options;
    if (!name.ends_with(".safetensors")) all.max_shard_size = 100'000;
    save(*solo(), views_of(held), folder_ / name, all);
    return {name, Checkpoint::open(folder_ / name), coefficient, step};
  }

  /// Inputs of these tensors in many layouts, with uneven coefficients.
  std::vector<MergeInput> several(const std::vector<Spec>& specs, int count) const {
    std::vector<MergeInput> inputs;
    for (int j = 0; j < count; ++j) {
      const std::string name = "input-" + std::to_string(j) + (j % 2 == 0 ? ".safetensors" : "");
      inputs.push_back(
          saved(name, specs, static_cast<unsigned>(17 + j), j == 1 ? -0.25 : 0.3 + 0.11 * j, 1000 * (j + 1)));
    }
    return inputs;
  }

  static std::vector<std::byte> whole_of(const Checkpoint& opened, const std::string& name) {
    const StoredTensor tensor = opened.tensor(name);
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
    opened.read(name, 0, Region::whole(tensor.shape).size(), bytes);
    return bytes;
  }

  /// That a tensor of the merge is the inputs' sum, within half an ulp and a part in 1e12 of the largest term.
  static void expect_sum(const std::vector<MergeInput>& inputs, const std::string& name,
                         const std::vector<std::byte>& bytes, DType dtype) {
    const auto size = static_cast<size_t>(dtype_bits(dtype) / 8);
    std::vector<long double> sums(bytes.size() / size, 0), largest(bytes.size() / size, 0);
    for (const MergeInput& input : inputs) {
      const auto& opened = std::get<Checkpoint>(input.tensors);
      const DType from = opened.tensor(name).dtype;
      const std::vector<std::byte> terms = whole_of(opened, name);
      for (size_t i = 0; i < sums.size(); ++i) {
        const long double term = static_cast<long double>(input.coefficient) *
                                 value_of(terms.data() + i * static_cast<size_t>(dtype_bits(from) / 8), from);
        sums[i] += term;
        largest[i] = std::max(largest[i], std::abs(term));
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      const double is = value_of(bytes.data() + i * size, dtype);
      const long double off = std::abs(static_cast<long double>(is) - sums[i]);
      ASSERT_LE(off, half_ulp(static_cast<double>(sums[i]), dtype) + 1e-12L * largest[i])
          << name << " at " << i << ": " << is;
    }
  }

  static void expect_error(Code code, const std::vector<std::string>& texts, const std::function<void()>& fn) {
    try {
      fn();
      ADD_FAILURE() << "nothing was thrown: " << texts[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      for (const std::string& text : texts)
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }
};

inline const std::vector<Spec> kMixed = {{"embed", DType::kBF16, {301, 2111}}, {"w32", DType::kF32, {129, 517}},
                                         {"half", DType::kF16, {333, 3}},      {"wide", DType::kF64, {77}},
                                         {"scalar", DType::kF32, {}},          {"none", DType::kBF16, {0, 4}},
                                         {"counts", DType::kI64, {13}},        {"flags", DType::kBool, {7}}};

}  // namespace shardow
