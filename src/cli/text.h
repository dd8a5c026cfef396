// Text for people and for programs: names from files that nobody has checked, numbers with units, JSON.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "shardow/tensor_view.h"

namespace shardow::cli {

/// What a terminal may be shown: control characters and bytes that are no UTF-8 become \x1b and the like. A name in a
/// header could otherwise move the cursor, or look like several lines.
std::string shown(std::string_view text);

std::string shown_bytes(int64_t bytes);       ///< "1.50 GB", "812 B"
std::string shown_shape(const Shape& shape);  ///< "[2, 3]"

/// "1 tensor", "2 tensors".
template <class Count>
std::string counted(Count count, std::string_view what) {
  return std::to_string(count) + " " + std::string(what) + (count == 1 ? "" : "s");
}

/// A JSON document as it is written, front to back. What is no UTF-8 becomes U+FFFD; numbers that are not finite become
/// null.
class Json {
 public:
  Json& begin_object() { return open('{'); }
  Json& end_object() { return close('}'); }
  Json& begin_list() { return open('['); }
  Json& end_list() { return close(']'); }
  Json& key(std::string_view name);
  Json& text(std::string_view value);
  Json& number(int64_t value);
  Json& number(double value);  ///< the shortest that gives the same float64 again
  Json& boolean(bool value);
  Json& null();
  Json& raw(std::string_view json);  ///< JSON as it stands
  Json& shape(std::span<const int64_t> sizes);

  const std::string& document() const noexcept { return out_; }

 private:
  Json& open(char bracket);
  Json& close(char bracket);
  void next();

  std::string out_;
  bool first_ = true;  ///< of its list or object, or behind a key: no comma
};

}  // namespace shardow::cli
