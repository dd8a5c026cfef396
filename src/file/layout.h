// The files of a checkpoint before they are written: which tensor is where, in bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "file/header.h"
#include "file/plan.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

inline constexpr const char* kChecksums = "shardow.crc32";  ///< key of the metadata

/// A file of the checkpoint, and which tensors (indices into what exchange() gave) are its entries.
struct FilePlan {
  std::string name;
  Header header;
  std::vector<size_t> tensors;
};

struct Place {
  size_t file;
  Entry entry;
};

/// Follows from names, dtypes, shapes and options alone: the same on every rank, and for every topology.
class Layout {
 public:
  Layout(const std::vector<Shared>& tensors, const SaveOptions& options);

  std::vector<FilePlan>& files() { return files_; }
  const Place& place(size_t tensor) const { return places_[tensor]; }
  int64_t total() const { return total_; }  ///< bytes of all tensors

 private:
  void fill(const std::vector<Shared>& tensors, const SaveOptions& options);

  std::vector<FilePlan> files_;
  std::vector<Place> places_;
  int64_t size_ = 0, total_ = 0;
};

/// {"name":"01234567",...}: of fixed width, so that the header's length is known before the data.
std::string checksum_text(const FilePlan& file, const std::vector<Shared>& tensors, const std::vector<uint64_t>& crcs);

/// Bytes of so many elements of a tensor. Throws kUnsupported where that is inside a byte (F4, F6).
int64_t bytes_of(int64_t elements, const Entry& entry);

}  // namespace shardow::file
