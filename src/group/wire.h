// Facts between ranks of one job, which run the same build: lengths and texts, checked as they are read; and whether
// ranks would say the same, in eight bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "base/errors.h"

namespace shardow::group {

/// Tells texts apart that differ by mistake, not by malice; the same in all processes of one build.
inline uint64_t digest(std::string_view text) noexcept {
  return std::hash<std::string_view>()(text);
}

class Sender {
 public:
  void number(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void text(std::string_view value) {
    number(static_cast<int64_t>(value.size()));
    bytes_.append(value);
  }
  void map(const std::map<std::string, std::string>& texts) {
    number(static_cast<int64_t>(texts.size()));
    for (const auto& [key, value] : texts) {
      text(key);
      text(value);
    }
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

inline std::string numbers_and_text(std::initializer_list<int64_t> numbers, std::string_view text) {
  Sender out;
  for (const int64_t number : numbers) out.number(number);
  out.text(text);
  return out.bytes();
}

/// Throws kInternal where the bytes are not what a Sender wrote.
class Receiver {
 public:
  explicit Receiver(std::string_view bytes) : left_(bytes) {}
  bool done() const { return left_.empty(); }
  int64_t number() {
    int64_t value = 0;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() { return std::string(take(static_cast<uint64_t>(number()))); }
  std::map<std::string, std::string> map() {
    std::map<std::string, std::string> texts;
    for (int64_t left = number(); left > 0; --left) {
      std::string key = text();
      texts[std::move(key)] = text();
    }
    return texts;
  }

 private:
  std::string_view take(uint64_t count) {
    if (count > left_.size())
      base::fail(Code::kInternal, "a rank's message ends {} bytes early; do all ranks run the same version?",
                 count - left_.size());
    const std::string_view taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }
  std::string_view left_;
};

}  // namespace shardow::group
