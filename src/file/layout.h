// The files of a checkpoint before they are written: which tensor is where, in bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "file/header.h"
#include "file/ownership.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

inline constexpr const char* kChecksums = "shardow.crc32";  ///< key of the metadata

/// Tensors with one name space: those of one file, or of a model in the Hugging Face layout, whose `file` is empty.
struct Volume {
  std::string file;
  Metadata metadata;
  std::vector<Shared> tensors;
};

/// A file of the checkpoint, and which tensors (indices into Layout::tensors()) are its entries.
struct FilePlan {
  std::string name;
  Header header;
  std::vector<size_t> tensors;

  int64_t size() const noexcept { return header.data_begin + header.data_size(); }
};

struct Place {
  size_t file;
  Entry entry;
};

/// Follows from names, dtypes, shapes and options alone: the same on every rank, and for every topology.
class Layout {
 public:
  Layout(std::vector<Volume> volumes, const SaveOptions& options);

  const std::vector<Shared>& tensors() const { return tensors_; }  ///< of all volumes
  std::vector<FilePlan>& files() { return files_; }
  const std::vector<FilePlan>& files() const { return files_; }
  const Place& place(size_t tensor) const { return places_[tensor]; }
  /// Who writes what of it; neighbours in a file have the same turn, so that they are written together. `rank`: what that one writes.
  std::vector<Owned> owners(size_t tensor, std::optional<int> rank = {}) const;
  int64_t total() const { return total_; }  ///< bytes of all tensors

  /// Puts the tensors' checksums into the headers, whose length stays what it is.
  void set_checksums(const std::vector<uint64_t>& crcs);

  /// Other names for the files of a Hugging Face layout, which only its index knows.
  void rename_files(const std::string& nonce);

 private:
  void add(Volume volume, const SaveOptions& options);
  void fill(FilePlan& file, size_t index, const Metadata& metadata, const SaveOptions& options);
  std::string checksum_text(const FilePlan& file, const std::vector<uint64_t>& crcs) const;

  std::vector<Shared> tensors_;
  std::vector<FilePlan> files_;
  std::vector<Place> places_;
  int64_t total_ = 0;
};

/// Bytes of so many elements of a tensor. Throws kUnsupported where that is inside a byte (F4, F6).
int64_t bytes_of(int64_t elements, const Entry& entry);

}  // namespace shardow::file
