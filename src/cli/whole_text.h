// Small files that are there whole or not at all.
#pragma once

#include <filesystem>
#include <string_view>

namespace shardow::cli {

/// Replaces what is there: a draft beside it, flushed, then renamed. Of a link that is what it leads to; a FIFO and a
/// device are written to, and what standard output leads to by way of put(). Throws kInvalidArgument for a block device
/// or a socket, kIo for a directory.
void write_text(const std::filesystem::path& path, std::string_view text);

/// Whether standard output is that file or pipe, as of /dev/stdout.
bool is_standard_output(const std::filesystem::path& path);

}  // namespace shardow::cli
