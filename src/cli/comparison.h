// Two checkpoints, tensor by tensor.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/sources.h"
#include "file/catalog.h"

namespace shardow::cli {

/// How far the numbers of two tensors are apart. The sums are long double: its range has room for squares of every
/// float64, and its 64 bits for every I64 and U64.
struct Deviation {
  bool equal_bytes = true;
  int64_t elements = 0;    ///< numbers: a C64 has two
  int64_t differing = 0;   ///< numbers of another value; NaN equals NaN, 0 equals -0
  int64_t not_finite = 0;  ///< of these, where a, b or a - b is NaN or infinite in float64; the sums leave them out
  double most = 0;         ///< max |a - b|
  long double squares = 0, squares_a = 0;  ///< of a - b, and of a

  double rms() const noexcept;
  double relative() const noexcept;  ///< |a - b| / |a|, in norms; infinite where a is 0 and b is not
};

/// A tensor that both have.
struct Pair {
  std::string name;
  const file::Catalog *catalog_a, *catalog_b;
  const file::Stored *a, *b;
  bool read = false;  ///< the same shape, and numbers or at least bytes that can be compared
  Deviation deviation = {};

  bool differs() const noexcept { return !read || a->entry.dtype != b->entry.dtype || !deviation.equal_bytes; }
};

struct Comparison {
  std::vector<std::string> only_a, only_b;  ///< ascending
  std::vector<Pair> pairs;                  ///< ascending by name

  bool differs() const noexcept;
};

/// What can be told from headers. Tensors are compared by name, whatever their files are called; where several files of
/// a side have the same names, by file and name. Throws kInvalidArgument where that is so of one side alone. Borrows
/// the sources.
Comparison compare_names(const std::vector<Source>& a, const std::vector<Source>& b);

/// Reads both, chunk by chunk, and fills in the deviations. `lanes` threads compare a tensor each; results do not
/// depend on how many there are.
void compare_values(Comparison& comparison, int lanes, const std::function<void(int64_t done, int64_t total)>& told);

}  // namespace shardow::cli
