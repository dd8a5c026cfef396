// Numbers in few bytes (LEB128): seven bits a byte, the lowest first; the eighth says that another byte follows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/errors.h"

namespace shardow::base {

inline void put_number(std::string& out, uint64_t number) {
  for (; number >= 0x80; number >>= 7) out.push_back(static_cast<char>(number | 0x80));
  out.push_back(static_cast<char>(number));
}

/// Reads one by one the numbers of put_number(), and texts. Throws kCorrupt, naming `what` they are.
class NumberReader {
 public:
  NumberReader(std::string_view bytes, const char* what) : left_(bytes), what_(what) {}

  size_t left() const noexcept { return left_.size(); }

  uint64_t next() {
    uint64_t number = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (left_.empty()) fail(Code::kCorrupt, "{} ends early", what_);
      const auto byte = static_cast<unsigned char>(left_.front());
      left_.remove_prefix(1);
      number |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return number;
    }
    fail(Code::kCorrupt, "{} has a number of more than 64 bits", what_);
  }

  std::string text(size_t bytes) {
    std::string text(left_.substr(0, bytes));
    left_.remove_prefix(text.size());
    return text;
  }

 private:
  std::string_view left_;
  const char* what_;
};

}  // namespace shardow::base
