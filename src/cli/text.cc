#include "cli/text.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <iterator>

#include "file/json.h"

namespace shardow::cli {
namespace {

/// Controls, and the marks that make terminals write backwards.
bool is_harmless(uint32_t code) {
  const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  const bool direction =
      (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069) || code == 0x2028 || code == 0x2029;
  return !control && !direction;
}

}  // namespace

std::string shown(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t size = file::utf8_character(text, code);
    if (size == 0 || (code < 0x80 && !is_harmless(code))) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(text[0]));
    } else if (!is_harmless(code)) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", code);
    } else {
      out += text.substr(0, size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  return out;
}

std::string shown_bytes(int64_t bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 999.995 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string shown_shape(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Json::Json(std::string_view text) {
  file::append_json_text(document_, text);
}

Json::Json(double number) : document_(std::isfinite(number) ? fmt::format("{}", number) : "null") {}

Json Json::raw(std::string document) {
  Json json(nullptr);
  json.document_ = std::move(document);
  return json;
}

Json Json::object(const Fields& fields) {
  std::string all;
  for (const auto& [name, value] : fields) {
    if (!all.empty()) all += ',';
    file::append_json_text(all, name);
    all += ':' + value.document();
  }
  return raw("{" + all + "}");
}

}  // namespace shardow::cli
