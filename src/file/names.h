// Names of a save's files: temporary ones, those of files that have a nonce, and those of texts that say which files
// belong together.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"

namespace shardow::file {

/// Texts that name the files of a save which has several with names of their own. The first one is the engine's.
inline constexpr const char* kAveragesName = "averages.json";
inline constexpr const char* kManifestName = "checkpoint.json";

/// ".<name>.<nonce>.tmp" beside `path`: a file or directory that is being written. The nonce has 16 hexadecimal digits.
/// Of a long name only the beginning is there, and a checksum of it, so that every name that the file system takes can
/// be saved to.
base::Path temporary_path(const base::Path& path, const std::string& nonce);

/// ".<name>.lock.tmp" beside `path`.
base::Path lock_path(const base::Path& path);

/// A temporary file or directory, of a dead save or of a living one.
struct Leftover {
  base::Path path;
  std::string stem;      ///< of what it was to become: its name, unless that is long
  base::Path lock_path;  ///< of a save to that name
};

/// Returns those in `folder`.
std::vector<Leftover> leftovers_in(const base::Path& folder);

/// Returns those that lie beside `path` and were to become it.
std::vector<Leftover> leftovers_of(const base::Path& path);

/// Returns "model-<nonce>-00002-of-00005.safetensors" of "model-00002-of-00005.safetensors" or "model.safetensors":
/// the name of a file in a directory that has older ones.
std::string name_with_nonce(std::string_view name, const std::string& nonce, size_t index, size_t count);
bool has_nonce(std::string_view name);

}  // namespace shardow::file
