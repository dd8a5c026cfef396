// What stands in the files of a checkpoint, before it is understood: their headers, read once, and the files
// themselves, opened.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "file/index.h"
#include "file/opened.h"

namespace shardow::file {

/// One version of the checkpoint, also where it is replaced while it is read.
struct Raw {
  struct Text {
    std::string path, json;
    int64_t data_bytes;
    base::Identity identity;
  };
  std::vector<Text> files;
  std::optional<WeightMap> weights;             ///< where an index says who has what
  std::vector<std::shared_ptr<Opened>> opened;  ///< by file, on this rank; not packed
};

/// Of a file, or of a directory with an index or with model.safetensors; with `names`, of these files of a directory.
Raw read_raw(const base::Path& path, const std::vector<std::string>& names);

/// Opens here what another rank has read. False where `path` has led to another version by then. On the same machine
/// that is told by the files' identities, else by their sizes and headers, which carry the checksums.
bool open_same(const base::Path& path, Raw& raw, bool same_machine);

/// For other ranks.
std::string pack_raw(const Raw& raw);
Raw unpack_raw(std::string_view bytes);

}  // namespace shardow::file
