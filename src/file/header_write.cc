#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/errors.h"
#include "file/header.h"
#include "file/json.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;

void append_metadata(std::string& out, const Metadata& metadata) {
  out += "\"__metadata__\":{";
  const char* comma = "";
  for (const auto& [key, text] : metadata) {
    out += comma;
    append_json_text(out, key);
    out += ':';
    append_json_text(out, text);
    comma = ",";
  }
  out += '}';
}

void append_entry(std::string& out, const Entry& entry) {
  append_json_text(out, entry.name);
  fmt::format_to(std::back_inserter(out), ":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", dtype_name(entry.dtype),
                 fmt::join(entry.shape, ","), entry.begin, entry.end);
}

/// Calls fn(text) for one piece of the JSON after another, so that its length is known without having all of it.
template <class Fn>
void for_each_piece(const Header& header, Fn fn) {
  std::string piece = "{";
  if (!header.metadata.empty()) append_metadata(piece, header.metadata);
  bool comma = !header.metadata.empty();
  for (const Entry& entry : header.entries) {
    if (std::exchange(comma, true)) piece += ',';
    append_entry(piece, entry);
    fn(std::as_const(piece));
    piece.clear();
  }
  piece += '}';
  fn(std::as_const(piece));
}

int64_t json_length(const Header& header) {
  int64_t length = 0;
  for_each_piece(header, [&](const std::string& piece) { length += static_cast<int64_t>(piece.size()); });
  return length;
}

int64_t padded(int64_t bytes) {
  return (bytes + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
}

void check_text(std::string_view text, const char* what) {
  if (!simdjson::validate_utf8(text.data(), text.size())) fail(Code::kInvalidArgument, "{} '{}' is not UTF-8", what, text);
}

}  // namespace

std::vector<Entry> in_file_order(std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tuple(-dtype_bits(a.dtype), std::string_view(a.name)) < std::tuple(-dtype_bits(b.dtype), std::string_view(b.name));
  });
  std::vector<std::string_view> names;
  int64_t at = 0;
  for (Entry& entry : entries) {
    check_text(entry.name, "the name");
    if (entry.name == "__metadata__") fail(Code::kInvalidArgument, "a tensor cannot be named '__metadata__' in a safetensors file");
    names.push_back(entry.name);
    entry.begin = at;
    at = base::checked_add(at, byte_size(entry.dtype, base::checked_product(entry.shape)));
    entry.end = at;
  }
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    fail(Code::kInvalidArgument, "'{}' is there twice", *twice);
  return entries;
}

Header lay_out(std::vector<Entry> entries, Metadata metadata) {
  for (const auto& [key, text] : metadata) {
    check_text(key, "the metadata key");
    check_text(text, "the metadata text");
  }
  Header header{in_file_order(std::move(entries)), std::move(metadata), 0};
  header.data_begin = padded(kLengthBytes + json_length(header));
  const int64_t length = header.data_begin - kLengthBytes;
  if (length > kMostHeaderBytes) {
    fail(Code::kInvalidArgument,
         "{} tensors make a header of {} bytes; readers take {} at most. Save into several files: max_shard_size=", header.entries.size(),
         length, kMostHeaderBytes);
  }
  return header;
}

std::string header_bytes(const Header& header) {
  std::string out(static_cast<size_t>(kLengthBytes), '\0');
  out.reserve(static_cast<size_t>(header.data_begin));
  for_each_piece(header, [&](const std::string& piece) { out += piece; });
  out.resize(static_cast<size_t>(padded(static_cast<int64_t>(out.size()))), ' ');
  const uint64_t length = out.size() - static_cast<size_t>(kLengthBytes);
  std::memcpy(out.data(), &length, sizeof length);
  return out;
}

}  // namespace shardow::file
