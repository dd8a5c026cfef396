// Where a rank puts a stripe together: memory that others on its machine write into, where they can reach it.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/shared_memory.h"
#include "shardow/group.h"

namespace shardow::file {

class StripeMemory {
 public:
  /// Nobody's but its own, as a single rank needs it; of no bytes where there are no stripes.
  explicit StripeMemory(size_t bytes) : alone_(bytes) {}

  /// Collective: every rank offers its memory, and says whose it has found.
  StripeMemory(Group& group, size_t bytes, std::chrono::milliseconds timeout);

  std::span<std::byte> own() noexcept { return own_ ? own_->bytes() : std::span(alone_); }

  /// The memory of another rank, where this one reaches it.
  std::optional<std::span<std::byte>> of(int rank) const {
    const auto& found = of_[static_cast<size_t>(rank)];
    return found ? std::optional(found->bytes()) : std::nullopt;
  }

  /// Whether another rank writes into this one's memory itself.
  bool is_reached_by(int rank) const { return reached_by_[static_cast<size_t>(rank)]; }

 private:
  std::optional<base::SharedMemory> own_;              // where others may reach it
  std::vector<std::optional<base::SharedMemory>> of_;  // by rank
  std::vector<bool> reached_by_;                       // by rank
  std::vector<std::byte> alone_;                       // where nobody reaches it
};

}  // namespace shardow::file
