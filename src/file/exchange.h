// Short runs, in two phases (Thakur, Gropp, Lusk: Data sieving and collective I/O in ROMIO, 1999): ranks give what they have of a stripe to
// its owner, who writes it whole. Each rank moves its own bytes once, and a file sees writes of megabytes.
#pragma once

#include <chrono>
#include <vector>

#include "file/feed.h"
#include "file/output.h"
#include "file/stripes.h"
#include "file/together.h"
#include "shardow/group.h"

namespace shardow::file {

class Exchange {
 public:
  /// `mine`, ascending by tensor and in owners()' order, outlives it. `sequential`: files are made here, and were counted before.
  Exchange(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine, const Layout& layout, Output& output,
           std::vector<std::vector<Stripe>> rounds, bool sequential);

  Part round();  ///< one stripe of every rank; each rank must have ended the one before well

 private:
  std::vector<int64_t> bytes_by_rank(const Stripe& stripe) const;
  std::vector<std::byte> pack(const Stripe& stripe);
  void place(const Stripe& stripe, int rank, std::span<const std::byte> message);
  void trade(const std::vector<Stripe>& stripes, const Stripe* own);
  void write(const Stripe& stripe);

  Group& group_;
  std::chrono::milliseconds timeout_;
  const std::vector<Mine>& mine_;
  const Layout& layout_;
  Output& output_;
  std::vector<std::vector<Stripe>> rounds_;
  bool sequential_;
  Feed feed_;
  std::vector<std::byte> stripe_, received_;
  size_t next_ = 0;
};

}  // namespace shardow::file
