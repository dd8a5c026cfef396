// Messages: how one rank sends another its parts of many tensors. Both sides cut what is wanted into the same messages,
// so that nothing has to be said about them: small pieces are packed together, large ones travel alone, none is longer
// than a bound.
//
//   Messages messages(wants.size(), [&](size_t i) { return Wanted{wants[i].region, 4}; });
//   while (const auto message = messages.next()) { fill or empty a block of all its bytes; send or receive
//   it; }
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "shardow/region.h"

namespace shardow {

/// A part of one tensor, in elements of `item_bytes` as they travel.
struct Wanted {
  Region region;
  int64_t item_bytes;
};

/// Elements [begin, begin + region.size()) of want number `want`, counted as it holds them; they lie `at` bytes from
/// their message's start.
struct MessagePiece {
  size_t want;
  Region region;
  int64_t begin, at, bytes;
};

/// Never empty. A piece of more than half of the bound is alone, at 0; others begin at multiples of 16 bytes, in the
/// order of the wants.
using Message = std::vector<MessagePiece>;

/// Every element of every want, once. Equal wants and bounds give equal messages. One thread at a time; holds one
/// message.
class Messages {
 public:
  static constexpr int64_t kMostBytes = 4 << 20;

  /// `wanted` is asked for wants 0 to `count` - 1, each once, in order, when its turn comes. `most_bytes`: of a
  /// message, unless one element is longer. What `wanted` throws comes out of next(), which throws kInvalidArgument
  /// itself for an item of no bytes.
  Messages(size_t count, std::function<Wanted(size_t)> wanted, int64_t most_bytes = kMostBytes);

  /// Nothing after the last. Cost O(1) for each piece.
  std::optional<Message> next();

 private:
  std::optional<Message> take();

  size_t count_;
  std::function<Wanted(size_t)> wanted_;
  int64_t most_;
  size_t next_want_ = 0;
  std::optional<Wanted> now_;  // want next_want_ - 1, of which elements before begin_ are in messages
  int64_t begin_ = 0;
  Message packed_;
  int64_t packed_bytes_ = 0;
};

}  // namespace shardow
