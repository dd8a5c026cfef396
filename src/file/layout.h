// The files of a checkpoint before they are written: which tensor is where, in bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "file/header.h"
#include "file/ownership.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

inline constexpr const char* kChecksums = "shardow.crc32";    ///< key of the metadata
inline constexpr const char* kWrittenBy = "shardow.version";  ///< key of the metadata: the version of this library

/// Tensors with one name space: those of one file, or of a model in the Hugging Face layout, whose `file` is empty.
struct Volume {
  std::string file;
  std::shared_ptr<const std::vector<Shared>> tensors;
  Metadata metadata;
};

struct Place {
  size_t file;
  const Entry& entry;
};

/// A file of the checkpoint.
struct FilePlan {
  std::string name;   ///< as it is called
  std::string asked;  ///< as was asked for
  Metadata metadata;
  std::vector<Entry> entries = {};
  std::vector<size_t> tensors = {};  ///< of each entry, an index into Layout::tensors()
  int64_t data_begin = 0;

  int64_t size() const noexcept { return data_begin + (entries.empty() ? 0 : entries.back().end); }
};

/// Which tensor is where follows from names, dtypes, shapes and options alone: the same on every rank and for every
/// topology, and in every save of the same tensors.
class Layout {
 public:
  Layout(const std::vector<Volume>& volumes, const SaveOptions& options);

  const std::vector<Shared>& tensors() const { return *tensors_; }  ///< of all volumes
  size_t first_of(size_t volume) const { return first_[volume]; }   ///< of its tensors
  const std::vector<FilePlan>& files() const { return files_; }
  Place place(size_t tensor) const {
    return {places_[tensor].file, files_[places_[tensor].file].entries[places_[tensor].entry]};
  }
  int64_t total() const { return total_; }  ///< bytes of all tensors

  /// Who writes what of it; neighbours in a file have the same turn, so that they are written together. `rank`: what
  /// that one writes.
  std::vector<Owned> owners(size_t tensor, std::optional<int> rank = {}) const;

  /// Puts the tensors' checksums into the headers, whose length stays what it is.
  void set_checksums(const std::vector<uint64_t>& crcs);

  /// Gives files other names, which only the text that lists them knows.
  void rename_files(const std::string& nonce);
  void rename_file(size_t file, std::string name) { files_[file].name = std::move(name); }

 private:
  struct Where {
    size_t file, entry;
  };

  void add(size_t first, const Volume& volume, const SaveOptions& options);
  std::string checksum_text(const FilePlan& file, const std::vector<uint64_t>& crcs) const;

  std::shared_ptr<const std::vector<Shared>> tensors_;
  std::vector<size_t> first_;
  std::vector<FilePlan> files_;
  std::vector<Where> places_;
  int64_t total_ = 0;
};

/// Bytes of so many elements of a tensor. Throws kUnsupported where that is inside a byte (F4, F6).
int64_t bytes_of(int64_t elements, const Entry& entry);

}  // namespace shardow::file
