// UTF-8, character by character.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shardow::file {

/// Bytes of the well-formed character at the front of `text` (RFC 3629), 0 where there is none; `code` is what it
/// means. `text` is not empty.
size_t utf8_character(std::string_view text, uint32_t& code) noexcept;

}  // namespace shardow::file
