// JSON text for what we write, and the UTF-8 in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace shardow::file {

/// Appends `text` as a JSON string. A byte 0xNN that is no UTF-8, of a path, becomes \\udcNN, as Python's
/// "surrogateescape" has it (PEP 383): os.fsencode() of what json.loads() gives is that path.
void append_json_text(std::string& out, std::string_view text);

/// Appends the members of an object, each a key and a text.
template <class Members>
void append_members(std::string& out, const Members& members, std::string_view comma, std::string_view colon) {
  std::string_view between;
  for (const auto& [key, text] : members) {
    out += std::exchange(between, comma);
    append_json_text(out, key);
    out += colon;
    append_json_text(out, text);
  }
}

/// Bytes of the well-formed character at the front of `text` (RFC 3629), 0 where there is none; `code` is what it
/// means. `text` is not empty.
size_t utf8_character(std::string_view text, uint32_t& code) noexcept;

}  // namespace shardow::file
