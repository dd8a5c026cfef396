// Pieces of at most half a message wait to be packed, so each packed message but the last is more than half full.
#include "tensor/messages.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace shardow {
namespace {

constexpr int64_t kAlign = 16;  // every element type may lie there

}  // namespace

Messages::Messages(size_t count, std::function<Wanted(size_t)> wanted, int64_t most_bytes)
    : count_(count), wanted_(std::move(wanted)), most_(most_bytes) {}

std::optional<Message> Messages::next() {
  for (;; now_.reset()) {
    if (!now_) {
      if (next_want_ == count_) break;
      now_ = wanted_(next_want_++);
      begin_ = 0;
      if (now_->item_bytes < 1)
        base::fail(Code::kInvalidArgument, "want {} has items of {} bytes", next_want_ - 1, now_->item_bytes);
    }
    while (begin_ < now_->region.size()) {
      if (auto full = take()) return full;
    }
  }
  if (packed_.empty()) return std::nullopt;
  return std::exchange(packed_, {});
}

/// The next piece of the want at hand: a message, if it fills one. Where it does not fit any more, what is packed; it
/// is next then.
std::optional<Message> Messages::take() {
  const int64_t length = std::min(std::max<int64_t>(most_ / now_->item_bytes, 1), now_->region.size() - begin_);
  const int64_t bytes = length * now_->item_bytes;
  const bool alone = bytes > most_ / 2;
  if (!alone && packed_bytes_ + bytes > most_) {
    packed_bytes_ = 0;
    return std::exchange(packed_, {});
  }
  MessagePiece piece{next_want_ - 1, now_->region.window(begin_, begin_ + length), begin_, alone ? 0 : packed_bytes_,
                     bytes};
  begin_ += length;
  if (alone) return Message{std::move(piece)};
  packed_.push_back(std::move(piece));
  packed_bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
  return std::nullopt;
}

}  // namespace shardow
