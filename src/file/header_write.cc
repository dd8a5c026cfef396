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

void append_entry(std::string& out, const Entry& entry) {
  append_json_text(out, entry.name);
  fmt::format_to(std::back_inserter(out), ":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                 dtype_name(entry.dtype), fmt::join(entry.shape, ","), entry.begin, entry.end);
}

/// Appends the JSON of a header.
void append_header(std::string& out, std::span<const Entry> entries, const Metadata& metadata) {
  out += '{';
  if (!metadata.empty()) {
    out += "\"__metadata__\":{";
    append_members(out, metadata, ",", ":");
    out += '}';
  }
  bool comma = !metadata.empty();
  for (const Entry& entry : entries) {
    if (std::exchange(comma, true)) out += ',';
    append_entry(out, entry);
  }
  out += '}';
}

int64_t padded(int64_t bytes) {
  return (bytes + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
}

void check_text(std::string_view text, const char* what) {
  if (!simdjson::validate_utf8(text.data(), text.size()))
    fail(Code::kInvalidArgument, "{} '{}' is not UTF-8", what, text);
}

}  // namespace

std::vector<Entry> in_file_order(std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tuple(-dtype_bits(a.dtype), std::string_view(a.name)) <
           std::tuple(-dtype_bits(b.dtype), std::string_view(b.name));
  });
  std::vector<std::string_view> names;
  int64_t at = 0;
  for (Entry& entry : entries) {
    check_text(entry.name, "the name");
    if (entry.name == "__metadata__")
      fail(Code::kInvalidArgument, "a tensor cannot be named '__metadata__' in a safetensors file");
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

int64_t entries_length(std::span<const Entry> entries) {
  int64_t length = entries.empty() ? 0 : static_cast<int64_t>(entries.size()) - 1;
  std::string one;
  for (const Entry& entry : entries) {
    one.clear();
    append_entry(one, entry);
    length += static_cast<int64_t>(one.size());
  }
  return length;
}

int64_t data_begin(size_t num_entries, int64_t entries_length, const Metadata& metadata) {
  for (const auto& [key, text] : metadata) {
    check_text(key, "the metadata key");
    check_text(text, "the metadata text");
  }
  std::string rest;
  append_header(rest, {}, metadata);
  const int64_t comma = num_entries > 0 && !metadata.empty() ? 1 : 0;
  const int64_t begin = padded(kLengthBytes + static_cast<int64_t>(rest.size()) + comma + entries_length);
  if (begin - kLengthBytes > kMostHeaderBytes) {
    fail(Code::kInvalidArgument,
         "{} tensors make a header of {} bytes; readers take {} at most. Save into several files: max_shard_size=",
         num_entries, begin - kLengthBytes, kMostHeaderBytes);
  }
  return begin;
}

std::string header_bytes(std::span<const Entry> entries, const Metadata& metadata, int64_t data_begin) {
  std::string out(static_cast<size_t>(kLengthBytes), '\0');
  out.reserve(static_cast<size_t>(data_begin));
  append_header(out, entries, metadata);
  out.resize(static_cast<size_t>(padded(static_cast<int64_t>(out.size()))), ' ');
  if (static_cast<int64_t>(out.size()) != data_begin)
    fail(Code::kInternal, "a header takes {} bytes where {} were left for it", out.size(), data_begin);
  const uint64_t length = out.size() - static_cast<size_t>(kLengthBytes);
  std::memcpy(out.data(), &length, sizeof length);
  return out;
}

}  // namespace shardow::file
