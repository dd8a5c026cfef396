// JSON text for what we write.
#pragma once

#include <string>
#include <string_view>

namespace shardow::file {

/// Appends `text`, which is UTF-8, as a JSON string.
void append_json_text(std::string& out, std::string_view text);

}  // namespace shardow::file
