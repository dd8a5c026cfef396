// Whether the bytes that all ranks have read are those that were saved.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "file/catalog.h"
#include "file/ownership.h"
#include "file/reader.h"
#include "group/collective_call.h"

namespace shardow::file {

/// The first of many names, for messages.
std::string listed(const std::vector<std::string>& names);

/// What the ranks find out about the bytes that they read: the checksum of every tensor, from one holder of each piece,
/// and of every piece with several holders what each of them read.
class Sums final : public group::Comparison {
 public:
  /// `path`: for messages. `wanted`, and `there`, what the file has of each or null, outlive it.
  Sums(std::string path, const std::vector<Shared>& wanted, const std::vector<const Stored*>& there);

  /// Whether a tensor's checksum can be compared: the file has it, and the ranks together read everything, each element
  /// counted once.
  bool of(size_t tensor) const { return verified_[tensor]; }

  /// Adds what `rank`, this one, has read: `sums` of its jobs, whose numbers are those of the wanted.
  void add(int rank, std::span<const Reader::Job> jobs, const std::vector<uint64_t>& sums);

  std::string words() override { return words_; }

  /// Throws kCorrupt where bytes are not what was saved.
  std::string sum_up(const std::vector<std::string>& by_rank) const override;
  void take(group::CollectiveCall& /*call*/, const std::string& /*total*/) override {}

 private:
  template <class Fn>
  void for_each_of(int rank, Fn fn) const;
  size_t place(size_t tensor, size_t piece) const { return firsts_[tensor] + piece; }
  [[noreturn]] void fail_changed(const std::set<size_t>& tensors) const;

  const std::string path_;
  const std::vector<Shared>& wanted_;
  const std::vector<const Stored*>& there_;
  std::vector<bool> verified_;
  std::vector<size_t> firsts_ = {0};  // of all tensors' pieces, one after another: each tensor's first, and the end
  std::string words_;
};

}  // namespace shardow::file
