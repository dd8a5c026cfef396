// What a checkpoint holds: one file, or a Hugging Face directory of them, opened once on every rank and read once by
// the first.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "file/header.h"
#include "file/opened.h"
#include "group/collective_call.h"
#include "shardow/checkpoint.h"
#include "shardow/group.h"

namespace shardow::file {

struct Stored {
  size_t file;  ///< index into Catalog::files
  Entry entry;
  std::optional<uint32_t> crc;  ///< where the file carries it
};

/// In the order of names.
class StoredTensors {
 public:
  StoredTensors() = default;
  explicit StoredTensors(std::vector<Stored> all);  ///< of one name the first stays

  auto begin() const noexcept { return all_.begin(); }
  auto end() const noexcept { return all_.end(); }
  size_t size() const noexcept { return all_.size(); }
  const Stored* find(std::string_view name) const noexcept;  ///< null: there is none

 private:
  std::vector<Stored> all_;
};

struct Catalog {
  struct Source {
    std::shared_ptr<Opened> file;
    int64_t data_begin;
    Metadata metadata;    ///< without what is for readers alone
    std::string version;  ///< of the library that wrote it; empty for others' files
  };
  std::string path;  ///< for messages
  std::vector<Source> files;
  StoredTensors tensors;

  const Metadata& metadata() const;                 ///< of the first file; none where an index names no file
  const Stored& find(std::string_view name) const;  ///< throws kNotFound
};

/// What the engine sees of a Checkpoint, and nobody else.
class Inside {
 public:
  static Checkpoint make(std::shared_ptr<const Catalog> catalog) { return Checkpoint(std::move(catalog)); }
  static const Catalog& of(const Checkpoint& checkpoint) noexcept { return *checkpoint.catalog_; }
  static std::shared_ptr<const Catalog> shared(const Checkpoint& checkpoint) { return checkpoint.catalog_; }
};

using Catalogs = std::vector<std::shared_ptr<const Catalog>>;

/// Checkpoints that rank 0 has found.
struct Location {
  std::vector<base::Path> paths;        ///< of checkpoints, or of one directory
  std::vector<std::string> names = {};  ///< files of the directory that belong together
  std::string words = {};               ///< what else all ranks know then
};

/// How ranks find and open the same version of each file, of one checkpoint or of several. What one rank throws is
/// thrown on all.
struct Finding {
  group::CollectiveCall::Prepare compared = {};  ///< in the first round
  std::function<Location()> find;                ///< on rank 0, after that; again where a version went meanwhile
  /// Returns on every rank what is compared in the round that finds out whether all have the same version; again where
  /// they have not.
  std::function<group::Comparisons(const Location&, const Catalogs&)> opened = {};

  Catalogs run(group::CollectiveCall& call) const;  ///< collective; by name, or by path
};

/// `path` is a file, or a directory with an index or with model.safetensors; with `names`, these files of a directory,
/// in their order. Rank 0 reads it, every rank opens it, and all have the same version, also where it is replaced
/// meanwhile. Collective; throws on every rank: kNotFound where nothing is there, kInvalidArgument where there are only
/// files with other names, kCorrupt for a missing part and for what breaks a rule, or kIo: with ENOENT where some host
/// does not see the path, with ESTALE for one that never stands still.
Catalogs share_catalogs(Group& group, const base::Path& path, const std::vector<std::string>& names,
                        std::chrono::milliseconds timeout);

}  // namespace shardow::file
