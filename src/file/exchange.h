// Short runs, in two phases (Thakur, Gropp, Lusk: Data sieving and collective I/O in ROMIO, 1999): ranks give what they have of a stripe to
// its owner, who writes it whole. On one machine they put it into the owner's memory, else it is sent. Files see writes of megabytes.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <vector>

#include "base/shared_memory.h"
#include "file/feed.h"
#include "file/output.h"
#include "file/stripes.h"
#include "file/together.h"
#include "shardow/group.h"

namespace shardow::file {

class Exchange {
 public:
  /// Collective. `mine`, ascending by tensor and in owners()' order, outlives it. `sequential`: files are made here, and were counted
  /// before.
  Exchange(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine, const Layout& layout, Output& output,
           std::vector<std::vector<Stripe>> rounds, bool sequential);

  Part round();  ///< one stripe of every rank; each rank must have ended the one before well

 private:
  void share_memory();
  std::vector<int64_t> bytes_by_rank(const Stripe& stripe) const;
  void deposit(const Stripe& stripe, std::span<std::byte> target);
  void pack(const Stripe& stripe);
  void unpack(const Stripe& stripe, int rank);
  void trade(const std::vector<Stripe>& stripes, const Stripe* own);
  void give(const Stripe& stripe);
  void take(const Stripe& stripe, int rank, int64_t bytes);
  void write(const Stripe& stripe);
  const Mine& part(size_t tensor, size_t piece) const;

  Group& group_;
  std::chrono::milliseconds timeout_;
  const std::vector<Mine>& mine_;
  const Layout& layout_;
  Output& output_;
  std::vector<std::vector<Stripe>> rounds_;
  bool sequential_;
  Feed feed_;

  std::optional<base::SharedMemory> own_;              // this rank's stripe, where others may reach it
  std::vector<std::optional<base::SharedMemory>> of_;  // by rank: the stripes that this rank reaches
  std::vector<bool> reached_by_;                       // by rank: who reaches this rank's
  std::vector<std::byte> alone_;                       // this rank's stripe, where nobody reaches it
  std::span<std::byte> stripe_;
  std::vector<std::byte> message_;
  Deadline deadline_;  // of this round's messages
  size_t next_ = 0;
};

}  // namespace shardow::file
