// What a checkpoint holds: one file, or a Hugging Face directory of them, read once and known to every rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "file/header.h"
#include "shardow/group.h"

namespace shardow::file {

struct Stored {
  size_t file;  ///< index into Catalog::files
  Entry entry;
  std::optional<uint32_t> crc;  ///< where the file carries it
};

struct Catalog {
  struct Source {
    base::Path path;
    int64_t data_begin;
  };
  std::string path;  ///< for messages
  std::vector<Source> files;
  std::map<std::string, Stored> tensors;
  Metadata metadata;  ///< of the first file, without what is for readers alone
};

/// `path` is a file, or a directory with an index or with model.safetensors. Read by rank 0. Collective; throws kNotFound, or kCorrupt for
/// what breaks a rule, on every rank.
Catalog share_catalog(Group& group, const base::Path& path, std::chrono::milliseconds timeout);

}  // namespace shardow::file
