// Small files that are there whole or not at all.
#pragma once

#include <filesystem>
#include <string_view>

namespace shardow::cli {

/// Replaces what is there: a draft beside it, flushed, then renamed.
void write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace shardow::cli
