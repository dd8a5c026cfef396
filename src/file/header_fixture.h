// For tests: a header of entries that have no offsets yet.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "file/header.h"

namespace shardow::file {

/// Returns a header of them, in the order in which files are written. Throws as in_file_order() and data_begin() do.
inline Header lay_out(std::vector<Entry> entries, Metadata metadata) {
  Header header{in_file_order(std::move(entries)), std::move(metadata), 0};
  header.data_begin = data_begin(header.entries.size(), entries_length(header.entries), header.metadata);
  return header;
}

inline int64_t data_size(const Header& header) {
  return header.entries.empty() ? 0 : header.entries.back().end;
}

}  // namespace shardow::file
