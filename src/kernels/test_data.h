// Memory and values for the kernels' tests: guarded, deliberately misaligned buffers, filled with the values that
// arithmetic trips over. A Problem is copied, each copy is updated by one implementation, and the copies, guards
// included, must then be equal byte for byte.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/row.h"

namespace shardow::kernels::testing {

using Random = std::mt19937_64;

inline constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
inline constexpr Form kForms[] = {Form::kCopy,        Form::kLerp,       Form::kMulAdd,
                                  Form::kTwoProducts, Form::kDifference, Form::kFusedDifference,
                                  Form::kQuotient,    Form::kStochastic};

inline size_t size_of(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

inline const char* name_of(DType dtype) {
  return dtype == DType::kF64 ? "f64" : dtype == DType::kF32 ? "f32" : dtype == DType::kBF16 ? "bf16" : "f16";
}

/// What the parameters may be. Averages may be anything in every mode.
enum class Values { kFinite, kFewNotFinite, kAnyBits };

/// `bytes` of memory `offset` bytes behind a 64-byte boundary, with 64 bytes and more of 0xa5 on both sides.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset)
      : lines_((bytes + offset) / sizeof(Line) + 3), offset_(sizeof(Line) + offset), bytes_(bytes) {
    std::memset(lines_.data(), 0xa5, lines_.size() * sizeof(Line));
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(lines_.data()) + offset_; }
  size_t bytes() const { return bytes_; }
  size_t offset() const { return offset_; }
  std::byte* whole() { return reinterpret_cast<std::byte*>(lines_.data()); }
  size_t whole_bytes() const { return lines_.size() * sizeof(Line); }
  bool operator==(const Buffer& other) const {
    return lines_.size() == other.lines_.size() && std::memcmp(lines_.data(), other.lines_.data(), whole_bytes()) == 0;
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
  size_t offset_, bytes_;
};

inline double special_value(Random& random) {
  static constexpr double kSpecial[] = {0.0,     -0.0,     1.0,      -1.0,    0x1p-149, -0x1p-140, 0x1p-126, 0x1.8p-24,
                                        6e-8,    0x1p-14,  65504.0,  65519.9, -65520.0, 1e30,      3.38e38,  3.4e38,
                                        -3.4e38, 0x1p-133, 0x1p-120, 2.0,     0.5,      1e-30};
  return kSpecial[random() % std::size(kSpecial)];
}

template <class T>
T random_element(Values values, double center, Random& random) {
  const auto kind = random() % 16;
  if (values == Values::kAnyBits || (values == Values::kFewNotFinite && random() % 128 == 0)) {
    if (random() % 4 == 0) return convert<T>(random() % 2 == 0 ? HUGE_VAL : -HUGE_VAL);
    const uint64_t bits = random();
    T any;
    std::memcpy(&any, &bits, sizeof(T));
    return any;
  }
  if (kind == 0) {
    const T special = convert<T>(special_value(random));
    return is_finite(convert<float>(special)) ? special : convert<T>(1.0);
  }
  if (kind < 4)
    return convert<T>(
        std::ldexp(std::uniform_real_distribution(-1.0, 1.0)(random), static_cast<int>(random() % 24) - 14));
  return convert<T>(center * (1 + std::uniform_real_distribution(-1e-3, 1e-3)(random)));
}

inline void fill(Buffer& buffer, DType dtype, Values values, Random& random, const std::vector<double>& centers) {
  with_dtype(dtype, [&]<class T>() {
    for (size_t i = 0; i * sizeof(T) < buffer.bytes(); ++i) {
      const T element = random_element<T>(values, centers[i % centers.size()], random);
      std::memcpy(buffer.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
}

/// One chunk and its memory.
struct Problem {
  Problem(DType parameter_dtype_, DType average_dtype_, int num_averages, int64_t count_, size_t parameter_offset,
          size_t average_offset, Values values, Random& random)
      : parameter_dtype(parameter_dtype_),
        average_dtype(average_dtype_),
        count(count_),
        parameter(bytes(parameter_dtype), parameter_offset * size_of(parameter_dtype)) {
    std::vector<double> centers(31);
    for (double& center : centers) center = std::uniform_real_distribution(-2.0, 2.0)(random);
    fill(parameter, parameter_dtype, values, random, centers);
    for (int k = 0; k < num_averages; ++k) {
      averages.emplace_back(bytes(average_dtype), (average_offset == 0 ? 0 : average_offset + static_cast<size_t>(k)) *
                                                      size_of(average_dtype));
      fill(averages.back(), average_dtype, random() % 4 == 0 ? Values::kFewNotFinite : Values::kFinite, random,
           centers);
    }
    global_begin =
        static_cast<int64_t>(random() % (uint64_t{1} << 31)) + static_cast<int64_t>(random() % 3) * (int64_t{1} << 32);
    tensor = random();
  }

  size_t bytes(DType dtype) const { return static_cast<size_t>(count) * size_of(dtype); }

  Chunk chunk() {
    Chunk chunk{};
    chunk.parameter = parameter.data();
    for (size_t k = 0; k < averages.size(); ++k) chunk.averages[k] = averages[k].data();
    chunk.count = count;
    chunk.global_begin = global_begin;
    chunk.tensor = tensor;
    chunk.parameter_dtype = parameter_dtype;
    chunk.average_dtype = average_dtype;
    return chunk;
  }

  bool operator==(const Problem& other) const { return parameter == other.parameter && averages == other.averages; }

  DType parameter_dtype, average_dtype;
  int64_t count;
  Buffer parameter;
  std::vector<Buffer> averages;
  int64_t global_begin;
  uint64_t tensor;
};

inline Step::One one(Form form, double weight) {
  return {form, 1 - weight, weight};
}

inline Step::One random_one(DType average_dtype, Random& random) {
  static constexpr double kWeights[] = {0.1, 1e-3, 1e-4, 1e-5, 0.5, 0.75, 0.49999, 1e-7};
  const bool narrow = average_dtype == DType::kBF16 || average_dtype == DType::kF16;
  Form form = kForms[random() % std::size(kForms)];
  if (narrow && form != Form::kCopy && form != Form::kLerp) form = Form::kStochastic;
  return one(form, kWeights[random() % std::size(kWeights)]);
}

inline Step make_step(int num_averages, bool hold, Random& random) {
  Step step{};
  step.num_averages = num_averages;
  step.hold = hold;
  step.seed = random();
  step.step = static_cast<int64_t>(random() % 1000000);
  return step;
}

inline Step random_step(DType average_dtype, int num_averages, bool hold, Random& random) {
  Step step = make_step(num_averages, hold, random);
  for (int k = 0; k < num_averages; ++k) step.averages[static_cast<size_t>(k)] = random_one(average_dtype, random);
  return step;
}

inline std::string describe(const Problem& problem, const Step& step) {
  std::string forms;
  for (int k = 0; k < step.num_averages; ++k) {
    const Step::One& one = step.averages[static_cast<size_t>(k)];
    forms += fmt::format(" {}/{}", static_cast<int>(one.form), one.weight);
  }
  return fmt::format("{} <- {}, {} elements, forms{}{}, offsets {} and {}", name_of(problem.average_dtype),
                     name_of(problem.parameter_dtype), problem.count, forms, step.hold ? ", hold" : "",
                     problem.parameter.offset() % 64, problem.averages.empty() ? 0 : problem.averages[0].offset() % 64);
}

/// Every pair of dtypes, or of different ones.
struct Pair {
  DType first, second;
  friend std::ostream& operator<<(std::ostream& out, const Pair& pair) {
    return out << name_of(pair.first) << " and " << name_of(pair.second);
  }
};

inline std::vector<Pair> all_pairs() {
  std::vector<Pair> pairs;
  for (const DType a : kDTypes) {
    for (const DType b : kDTypes) pairs.push_back({a, b});
  }
  return pairs;
}

}  // namespace shardow::kernels::testing
