// JSON text for what we write.
#pragma once

#include <string>
#include <string_view>

namespace shardow::file {

/// Appends `text` as a JSON string. A byte 0xNN that is no UTF-8, of a path, becomes \\udcNN, as Python's
/// "surrogateescape" has it (PEP 383): os.fsencode() of what json.loads() gives is that path.
void append_json_text(std::string& out, std::string_view text);

}  // namespace shardow::file
