#include "file/json.h"

#include <fmt/format.h>

#include <iterator>

#include "file/utf8.h"

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

}  // namespace shardow::file
