// Loading from a catalog that has been read before.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "file/catalog.h"
#include "file/ownership.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// What ranks want of a catalog, and what is there.
struct Wanted {
  std::string told;                     ///< by this rank, of what it holds
  std::string said;                     ///< by all ranks
  std::vector<Shared> tensors;          ///< ascending by name
  std::vector<const Stored*> there;     ///< of each, or null
  std::vector<std::string> unexpected;  ///< names of what nobody wants
};

/// As shardow::load(). The catalog is the same on every rank: share_catalog() gave it. `kept`: what an earlier load
/// from the same catalog has found out of the same views, so that it need not be found out again; and then what this
/// one has.
LoadReport load_from(Group& group, std::span<const TensorView> views, const Catalog& catalog,
                     const LoadOptions& options, std::optional<Wanted>* kept = nullptr);

/// What a rank wants of a checkpoint. `strict`: as LoadOptions::strict, in place of it.
struct Chosen {
  std::vector<TensorView> views;
  bool strict;
};
using Choose = std::function<Chosen(const std::shared_ptr<const Catalog>&)>;

/// The same from a path, where a rank says what it wants when it knows what is there. What `choose` throws on one rank
/// is thrown on all, and nothing has been changed; it is called again where the path has been replaced meanwhile. Three
/// steps, if nobody asks for progress and everybody is done within the time of a part: what is there, who wants what,
/// the bytes.
LoadReport load_chosen(Group& group, const base::Path& path, const Choose& choose, LoadOptions options);

/// Fills `view` from the tensor of its name, converting its dtype; compares the checksum where the file carries one and
/// all is read. Local. Throws kNotFound, kInvalidArgument, kCorrupt, and kIo with ESTALE where the file was written
/// over.
void read_one(const Catalog& catalog, const TensorView& view);

}  // namespace shardow::file
