#include "cli/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "cli/terminal.h"
#include "file/layout.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

template <class T>
void convert(const std::byte* from, long double* to, int64_t count) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<long double>(value);
  }
}

/// Converts F16 and BF16.
void convert_halves(const std::byte* from, DType dtype, long double* to, int64_t count) noexcept {
  std::array<float, kMostNumbers> floats;
  kernels::cpu::cast(from, dtype, floats.data(), DType::kF32, count);
  std::copy_n(floats.begin(), count, to);
}

/// A float of 8 bits: `mantissa` bits at its end, exponents with this bias; `finite` and `fnuz` are the ways in which
/// it has no infinity.
double small_float(unsigned bits, int mantissa, int bias, bool ieee, bool fnuz) {
  const unsigned magnitude = bits & 0x7f, exponent = magnitude >> mantissa,
                 fraction = magnitude & ((1u << mantissa) - 1);
  const unsigned top = 0x7fu >> mantissa;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (fnuz && bits == 0x80) return kNan;
  if (ieee && exponent == top)
    return fraction != 0 ? kNan : (bits & 0x80 ? -1 : 1) * std::numeric_limits<double>::infinity();
  if (!ieee && !fnuz && magnitude == 0x7f) return kNan;
  const double value = exponent == 0
                           ? std::ldexp(fraction, 1 - bias - mantissa)
                           : std::ldexp((1u << mantissa) + fraction, static_cast<int>(exponent) - bias - mantissa);
  return (bits & 0x80) != 0 ? -value : value;
}

using Table = std::array<double, 256>;

/// Returns the values of all bytes of a float of 8 bits.
const Table& table_for(DType dtype) {
  static const std::map<DType, Table> tables = [] {
    std::map<DType, Table> made;
    for (unsigned i = 0; i < 256; ++i) {
      made[DType::kF8E5M2][i] = small_float(i, 2, 15, true, false);
      made[DType::kF8E4M3][i] = small_float(i, 3, 7, false, false);
      made[DType::kF8E5M2Fnuz][i] = small_float(i, 2, 16, false, true);
      made[DType::kF8E4M3Fnuz][i] = small_float(i, 3, 8, false, true);
      made[DType::kF8E8M0][i] = i == 255 ? std::nan("") : std::ldexp(1.0, static_cast<int>(i) - 127);
    }
    return made;
  }();
  return tables.at(dtype);
}

}  // namespace

bool has_values(DType dtype) noexcept {
  return dtype_bits(dtype) >= 8;
}

void to_numbers(const std::byte* from, DType dtype, long double* to, int64_t count) noexcept {
  switch (dtype) {
    case DType::kF64: return convert<double>(from, to, count);
    case DType::kF32: return convert<float>(from, to, count);
    case DType::kC64: return convert<float>(from, to, 2 * count);
    case DType::kF16:
    case DType::kBF16: return convert_halves(from, dtype, to, count);
    case DType::kBool:
    case DType::kU8: return convert<uint8_t>(from, to, count);
    case DType::kI8: return convert<int8_t>(from, to, count);
    case DType::kI16: return convert<int16_t>(from, to, count);
    case DType::kU16: return convert<uint16_t>(from, to, count);
    case DType::kI32: return convert<int32_t>(from, to, count);
    case DType::kU32: return convert<uint32_t>(from, to, count);
    case DType::kI64: return convert<int64_t>(from, to, count);
    case DType::kU64: return convert<uint64_t>(from, to, count);
    default: break;
  }
  if (!has_values(dtype)) return;
  const Table& table = table_for(dtype);
  for (int64_t i = 0; i < count; ++i) to[i] = table[static_cast<uint8_t>(from[i])];
}

void read_elements(const file::Catalog& catalog, const file::Stored& stored, int64_t begin, int64_t end,
                   std::vector<std::byte>& memory) {
  const file::Catalog::Source& source = catalog.files[stored.file];
  const int64_t first = file::bytes_of(begin, stored.entry);
  memory.resize(static_cast<size_t>(file::bytes_of(end, stored.entry) - first));
  source.file->handle()->read(memory, source.data_begin + stored.entry.begin + first);
}

Extremes extremes_of(const file::Catalog& catalog, const file::Stored& stored) {
  const DType dtype = stored.entry.dtype;
  const int64_t size = Region::whole(stored.entry.shape).size(), parts = dtype == DType::kC64 ? 2 : 1;
  Extremes extremes;
  std::vector<std::byte> memory;
  std::array<long double, kMostNumbers> numbers;
  const auto add = [&](long double number) {
    ++extremes.numbers;
    if (std::isnan(number)) {
      ++extremes.nan;
    } else if (std::isinf(number)) {
      ++extremes.infinite;
    } else {
      const bool first = extremes.numbers == extremes.nan + extremes.infinite + 1;
      extremes.least = first ? number : std::min(extremes.least, number);
      extremes.most = first ? number : std::max(extremes.most, number);
    }
  };
  for (int64_t begin = 0; begin < size; begin += kMostElements) {
    check_interrupted();
    const int64_t end = std::min(begin + kMostElements, size);
    read_elements(catalog, stored, begin, end, memory);
    for (int64_t at = begin; at < end; at += kMostNumbers / parts) {
      const int64_t count = std::min(kMostNumbers / parts, end - at);
      to_numbers(memory.data() + (at - begin) * dtype_bits(dtype) / 8, dtype, numbers.data(), count);
      std::for_each_n(numbers.begin(), count * parts, add);
    }
  }
  catalog.files[stored.file].file->check_unchanged();
  return extremes;
}

}  // namespace shardow::cli
