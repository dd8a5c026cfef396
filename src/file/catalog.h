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

#include "comm/agree.h"
#include "file/header.h"
#include "file/opened.h"
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
};

/// `path` is a file, or a directory with an index or with model.safetensors. Rank 0 reads it, every rank opens it, and
/// all have the same version, also where it is replaced meanwhile. Collective; throws on every rank: kNotFound where
/// nothing is there, kInvalidArgument where there are only files with other names, kCorrupt for a missing part and for
/// what breaks a rule, or kIo: with ENOENT where some host does not see the path, with ESTALE for one that never stands
/// still.
Catalog share_catalog(Group& group, const base::Path& path, std::chrono::milliseconds timeout);

/// The same, and what `sum_up` makes, on one rank, of what every rank has to say of what is there: what `told` gave on
/// each, in the round that finds out whether all have the same version. What they throw on one rank is thrown on all;
/// both are called again where some rank came too late for a version.
struct Discussed {
  std::shared_ptr<const Catalog> catalog;
  std::string said;
};
Discussed discuss_catalog(Group& group, const base::Path& path, std::chrono::milliseconds timeout,
                          const std::function<std::string(const std::shared_ptr<const Catalog>&)>& told,
                          const comm::SumUp& sum_up);

/// share_catalog() for files of one directory that belong together, in the order of `names`.
std::vector<Catalog> share_catalogs(Group& group, const base::Path& directory, const std::vector<std::string>& names,
                                    std::chrono::milliseconds timeout);

}  // namespace shardow::file
