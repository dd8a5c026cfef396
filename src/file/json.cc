#include "file/json.h"

#include <fmt/format.h>

#include <array>
#include <iterator>

namespace shardow::file {

void append_json_text(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t size = utf8_character(text, code);
    const auto byte = static_cast<unsigned char>(text[0]);
    if (size == 0) {
      fmt::format_to(std::back_inserter(out), "\\udc{:02x}", byte);
    } else if (byte == '"' || byte == '\\') {
      out += '\\';
      out += text[0];
    } else if (byte < 0x20) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", byte);
    } else {
      out += text.substr(0, size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  out += '"';
}

size_t utf8_character(std::string_view text, uint32_t& code) noexcept {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t size = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (size == 0 || size > text.size()) return 0;
  code = size == 1 ? first : first & (0xffu >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fu);
  }
  constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  return code < kLeast[size] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : size;
}

}  // namespace shardow::file
