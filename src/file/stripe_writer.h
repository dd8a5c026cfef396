// Short runs, in two phases (Thakur, Gropp, Lusk: Data sieving and collective I/O in ROMIO, 1999): ranks give what they
// have of a stripe to its owner, who writes it whole. Files see writes of megabytes.
#pragma once

#include <chrono>
#include <vector>

#include "comm/parts.h"
#include "file/output.h"
#include "file/stripe_parts.h"
#include "file/stripes.h"
#include "shardow/group.h"

namespace shardow::file {

class StripeWriter {
 public:
  /// `mine`, ascending by tensor and in owners()' order, outlives it. `sequential`: files are made here, and
  /// were counted before.
  StripeWriter(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine, const Layout& layout,
               Output& output, std::vector<std::vector<Stripe>> rounds, bool sequential);

  comm::Part round();  ///< one stripe of every rank; each rank must have ended the one before well

 private:
  void give(const Stripe& stripe);
  void take(const Stripe& stripe, int rank, int64_t bytes);
  void write(const Stripe& stripe);

  Group& group_;
  std::chrono::milliseconds timeout_;
  const Layout& layout_;
  Output& output_;
  std::vector<std::vector<Stripe>> rounds_;
  bool sequential_;
  StripeParts parts_;
  std::vector<std::byte> stripe_, message_;  // this rank's stripe; its parts of another's, or another's of it
  Deadline deadline_;                        // of this round's messages
  size_t next_ = 0;
};

}  // namespace shardow::file
