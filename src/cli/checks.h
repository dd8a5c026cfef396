// Checksums of files: CRC-32 of each tensor as their headers have it.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "file/catalog.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"

namespace shardow::cli {

/// The CRC-32 of every tensor of a file, of parts in any order. Any threads at once.
class TensorSums {
 public:
  explicit TensorSums(const Checkpoint& file);

  int64_t known() const noexcept { return known_; }  ///< tensors whose checksum the header has
  int64_t data_begin() const noexcept { return data_begin_; }
  void add(int64_t offset, std::span<const std::byte> bytes);  ///< of the file
  std::vector<std::string> problems() const;                   ///< when all was added

 private:
  std::vector<const file::Stored*> tensors_;  // ascending, as they lie in the file
  std::unique_ptr<std::atomic<uint32_t>[]> sums_;
  int64_t data_begin_;
  int64_t known_ = 0;
};

/// One file to be read, and what became of it.
struct FileCheck {
  std::filesystem::path path;
  std::optional<Checkpoint> checkpoint;  ///< what could not be opened has none

  std::unique_ptr<TensorSums> sums;
  int64_t size = 0;                   ///< bytes
  std::vector<std::string> problems;  ///< what is wrong with it
  std::optional<Error> trouble;       ///< why it could not be read
};

/// Reads the tensors of files that have checksums, on `lanes` threads.
void run_checks(std::vector<FileCheck>& files, int lanes, const std::function<void(int64_t done, int64_t total)>& told);

}  // namespace shardow::cli
