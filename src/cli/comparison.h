// Two checkpoints, tensor by tensor.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/deviation.h"
#include "cli/sources.h"
#include "file/catalog.h"

namespace shardow::cli {

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

/// Reads both once, on `lanes` threads, and fills in the deviations, which do not depend on how many. Of a tensor that
/// differs, what was found equal before is read again, on one side.
void compare_values(Comparison& comparison, int lanes, const std::function<void(int64_t done, int64_t total)>& told);

}  // namespace shardow::cli
