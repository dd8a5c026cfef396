// What saves call their files: which names of a directory belong to a checkpoint, and which lie beside a target for the
// time of a save.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"

namespace shardow::file {

/// "model-00002-of-00005.safetensors", or with 16 hexadecimal digits before the number, as storage without renaming has
/// them.
bool is_shard_name(std::string_view name);
bool is_shard_of_a_save(std::string_view name);  ///< with these digits: the nonce of the save that made it

/// The .safetensors files that the index of a directory names; none where there is no index, or none that can be read.
std::set<std::string> names_in_index(const base::Path& directory);

/// The files of a directory that a checkpoint in the Hugging Face layout replaces: its index, what that names,
/// model.safetensors, shards.
std::set<std::string> hugging_face_names(const base::Path& directory);

enum class Temporary {
  kDraft,    ///< .<name>.<nonce>.tmp: what is being written
  kRenamed,  ///< .<name>.<nonce>-renamed.tmp: the same for an instant, to see whether it can be renamed
  kOld,      ///< .<name>.<nonce>-old.tmp: the directory that a new one has replaced, or is about to; whole
  kSpent,  ///< .<name>.<nonce>-spent.tmp: the same once the new one is on the disk: it is emptied, and nobody looks for
           ///< a checkpoint there
};

/// Beside `target`. The nonce has 16 hexadecimal digits. Of a long name only the beginning is there, and a checksum of
/// it, so that every name that the file system takes can be saved to.
base::Path temporary_path(const base::Path& target, const std::string& nonce, Temporary kind);

struct Leftover {
  base::Path path;
  Temporary kind;
  std::string nonce;
};

/// All that lie beside `target` now, of dead saves and of living ones.
std::vector<Leftover> leftovers_of(const base::Path& target);

/// Where `target` is missing: the newest old directory beside it, if there is one.
std::optional<base::Path> old_of(const base::Path& target);

/// `path`, or where a save died between two renames the old directory that stood there, which the next save will put
/// back. Also for the path of a file in such a directory. Throws nothing that opening `path` would not.
base::Path standing(const base::Path& path);

}  // namespace shardow::file
