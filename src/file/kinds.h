// Kinds of ranks: those that list the same tensors; and how their regions are told in few bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardow::file {

/// Ranks with one list, and the regions that they told.
struct Kind {
  std::vector<int64_t> ranks;
  std::vector<std::vector<std::string>> regions;  // [class][index in ranks]
  std::string list;                               // empty: none of them told it
};

/// Returns all kinds in one text, of one alone without its list, which all have. unpack() throws kInternal or
/// kCorrupt for what is none.
std::string pack(const std::vector<Kind>& kinds);
std::vector<Kind> unpack(const std::string& said);

/// Compressed.
std::string packed(const std::string& bytes);
std::string unpacked(std::string_view bytes);

}  // namespace shardow::file
