// The header of a safetensors file: 8 bytes of length, JSON, data. docs/file_format.md has the rules; a file from
// elsewhere is hostile until it is here.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "shardow/region.h"
#include "shardow/tensor_view.h"

namespace shardow::file {

using Metadata = std::map<std::string, std::string>;

inline constexpr int64_t kLengthBytes = 8;                ///< little endian, of the JSON with its padding
inline constexpr int64_t kMostHeaderBytes = 100'000'000;  ///< the reference parser's cap, in bytes of JSON
inline constexpr int64_t kDataAlignment = 4096;           ///< where data begins in files that we write

/// One tensor of a file. [begin, end) are bytes of the data section.
struct Entry {
  std::string name;
  DType dtype;
  Shape shape;
  int64_t begin, end;
};

/// Invariants: entries are ascending and adjacent, the first begins at 0, each has the size that its dtype and shape
/// say; names are unique.
struct Header {
  std::vector<Entry> entries;
  Metadata metadata;
  int64_t data_begin = 0;  ///< byte of the file
};

/// The JSON of a header whose data section has `data_bytes` bytes. `where` is for messages. Throws kCorrupt for what
/// breaks a rule, naming the tensor.
Header parse_header(std::string_view json, int64_t data_bytes, std::string_view where);

/// A header as it stands in a file, not yet parsed.
struct HeaderText {
  std::string json;
  int64_t data_bytes;
};

/// Reads nothing but the header, and allocates no more than the file's length has shown to be there.
HeaderText read_header(const base::File& file);

/// Sets offsets in the order in which files are written (wide dtypes first, then by name), which depends on names and
/// dtypes alone. Throws kInvalidArgument for a name that is not UTF-8, is "__metadata__" or comes twice.
std::vector<Entry> in_file_order(std::vector<Entry> entries);

/// Bytes of JSON that they take in a header, with the commas between them.
int64_t entries_length(std::span<const Entry> entries);

/// Where the data of a file begins, of so many entries, whose JSON has so many bytes. Throws kInvalidArgument above
/// kMostHeaderBytes, and for metadata that are not UTF-8.
int64_t data_begin(size_t num_entries, int64_t entries_length, const Metadata& metadata);

/// The length word and the JSON, padded with spaces to kDataAlignment: everything before the data, which begins at
/// `data_begin`.
std::string header_bytes(std::span<const Entry> entries, const Metadata& metadata, int64_t data_begin);

}  // namespace shardow::file
