// The files of a checkpoint while they are written: offsets, checksums' parts, what this rank wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/files.h"
#include "file/crc.h"
#include "file/layout.h"
#include "file/staging.h"

namespace shardow::file {

class Output {
 public:
  /// `early`: what is written goes to the disk at once, while more of it is made.
  Output(const Layout& layout, const Target& target, bool checksums, bool early);

  /// `data` belongs at byte `begin` of the tensor. Every byte is counted once, over all ranks.
  void count(size_t tensor, int64_t begin, std::span<const std::byte> data);

  /// Short pieces that follow one another in a file, of one tensor or of neighbours, are put together and written at
  /// once.
  void write(size_t tensor, int64_t begin, std::span<const std::byte> data);

  /// Where files are written from front to end: makes this one, with its header, unless that is done.
  void begin_file(size_t file);

  void finish();  ///< flushes and closes

  void add(Output& other);  ///< what another output of the same files counted and wrote

  std::vector<uint64_t>& crcs();  ///< by tensor: what this rank contributes
  int64_t written() const { return written_; }

 private:
  void flush();
  base::File made_by_first(base::File (*open)(const base::Path&), const std::string& name) const;
  base::File& keep(size_t file, base::File opened);

  const Layout& layout_;
  const Target& target_;
  bool checksums_, early_;
  std::vector<uint64_t> crcs_;
  CrcSum sum_;  // of counted_, not yet in crcs_
  std::optional<size_t> counted_;
  std::vector<std::unique_ptr<base::File>> files_;
  std::deque<size_t> open_;  // which of them are open, the oldest first: a few, since files come one after another
  std::vector<bool> begun_;  // made by begin_file()
  int64_t written_ = 0;

  std::vector<std::byte> pending_;  // to be written at byte pending_at_ of file pending_file_
  size_t pending_file_ = 0;
  int64_t pending_at_ = 0;
};

}  // namespace shardow::file
