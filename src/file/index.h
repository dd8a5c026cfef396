// The Hugging Face layout: which file of a directory has which tensor. An index from elsewhere is as hostile as a
// header.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/files.h"

namespace shardow::file {

inline constexpr const char* kSingleName = "model.safetensors";
inline constexpr const char* kIndexName = "model.safetensors.index.json";
inline constexpr int64_t kMostIndexBytes = 1'000'000'000;

using WeightMap = std::map<std::string, std::string>;  ///< tensor -> plain file name

/// Throws kCorrupt for what is no index, and for file names that are not plain names in the index's own directory.
WeightMap parse_index(std::string_view json, std::string_view where);
WeightMap read_index(const base::File& file);

/// `replaced`: files that go once this index is there.
std::string index_bytes(const WeightMap& weights, int64_t total_size, const std::set<std::string>& replaced = {});

/// What a directory's index says of its files, or another text that names them.
struct Listing {
  std::map<std::string, std::string>
      files;                       ///< names, by those that their save was asked for; an index's by themselves
  std::set<std::string> replaced;  ///< what goes, and may be there yet

  bool names(const std::string& file) const;
};

/// Throws kCorrupt for what is no JSON object. Names that are no plain names of .safetensors files are left out.
Listing parse_listing(std::string_view json, std::string_view where);
Listing read_listing(const base::File& file);

/// Nothing where there is no such text, or where it is no listing's.
std::optional<Listing> listing_in(const base::Path& directory, const char* name);

/// `text`, a JSON object, with a listing at its end.
std::string with_listing(std::string text, const Listing& listing);

/// "model-00002-of-00005.safetensors"; with one file "model.safetensors".
std::string shard_name(size_t index, size_t count);

}  // namespace shardow::file
