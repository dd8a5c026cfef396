// Text for people and for programs: names from files that nobody has checked, numbers with units, JSON.
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

/// A JSON document, made of its values. What is no UTF-8 becomes U+FFFD; numbers that are not finite become null.
class Json {
 public:
  using Fields = std::vector<std::pair<std::string_view, Json>>;

  Json(std::nullptr_t) : document_("null") {}
  Json(std::string_view text);
  Json(const char* text) : Json(std::string_view(text)) {}
  Json(const std::string& text) : Json(std::string_view(text)) {}
  Json(const std::filesystem::path& path) : Json(path.string()) {}
  Json(double number);  ///< the shortest that gives the same float64 again
  template <std::integral Number>
  Json(Number number) : document_(fmt::format("{}", number)) {}  ///< also of bool
  template <class Value>
  Json(const std::optional<Value>& value) : Json(value ? Json(*value) : Json(nullptr)) {}
  template <class Value>
  Json(const std::vector<Value>& values) : Json(list(values, [](const Value& value) { return Json(value); })) {}

  static Json raw(std::string document);  ///< JSON as it stands
  static Json object(const Fields& fields);

  /// A list of what `of` makes of each value.
  template <class Values, class Of>
  static Json list(const Values& values, const Of& of) {
    std::string all;
    for (const auto& value : values) (all += all.empty() ? "" : ",") += of(value).document();
    return raw("[" + all + "]");
  }

  const std::string& document() const noexcept { return document_; }

 private:
  std::string document_;
};

}  // namespace shardow::cli
