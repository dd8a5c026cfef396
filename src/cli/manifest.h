// Manifests: SHA-256 of whole files, in the format of sha256sum, beside the files. `sha256sum -c` checks them, and what
// it wrote is checked here.
//
//   file      = line*
//   line      = ["\"] (digest " " (" " | "*") name | "SHA256 (" name ") = " digest) "\n"
//                                                          a backslash in front: in the name \n, \r and \\ stand for
//                                                          what they mean
//   digest    = 64 hexadecimal digits
//
// Of a file x.safetensors it is x.safetensors.sha256 beside it, of a directory SHA256SUMS in it. Names ascend; they are
// of files beside it, or below: sub/x; what is not, such as ../x, is refused. The first form is written, both are read.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace shardow::cli {

using Digests =
    std::map<std::string, std::string>;  ///< file, from the manifest's folder -> 64 lower-case hexadecimal digits

inline constexpr int64_t kMostManifestBytes = 16 << 20;

/// Throws kInvalidArgument where such a name would be too long.
std::filesystem::path manifest_of(const std::filesystem::path& path);

/// Throws kNotFound; kCorrupt, naming the line.
Digests read_manifest(const std::filesystem::path& manifest);

/// All of it or nothing; replaces what is there.
void write_manifest(const std::filesystem::path& manifest, const Digests& digests);

std::string to_text(const Digests& digests);
Digests parse_manifest(std::string_view text, std::string_view where);  ///< throws kCorrupt

}  // namespace shardow::cli
