// The Hugging Face layout: which file of a directory has which tensor. An index from elsewhere is as hostile as a
// header.
#pragma once

#include <map>
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

std::string index_bytes(const WeightMap& weights, int64_t total_size);

/// "model-00002-of-00005.safetensors"; with one file "model.safetensors".
std::string shard_name(size_t index, size_t count);

}  // namespace shardow::file
