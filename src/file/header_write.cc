#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>

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

void check_text(std::string_view text, const char* what) {
  if (!simdjson::validate_utf8(text.data(), text.size())) fail(Code::kInvalidArgument, "{} '{}' is not UTF-8", what, text);
}

}  // namespace

Header lay_out(std::vector<Entry> entries, Metadata metadata) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tuple(-dtype_bits(a.dtype), std::string_view(a.name)) < std::tuple(-dtype_bits(b.dtype), std::string_view(b.name));
  });
  std::vector<std::string_view> names;
  int64_t at = 0;
  for (Entry& entry : entries) {
    check_text(entry.name, "the name");
    if (entry.name == "__metadata__") fail(Code::kInvalidArgument, "a tensor cannot be named '__metadata__' in a safetensors file");
    names.push_back(entry.name);
    int64_t elements = 1;
    for (const int64_t size : entry.shape) elements *= size;  // the region that it comes from has checked the product
    entry.begin = at;
    at += byte_size(entry.dtype, elements);
    entry.end = at;
  }
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    fail(Code::kInvalidArgument, "'{}' is there twice", *twice);
  for (const auto& [key, text] : metadata) {
    check_text(key, "the metadata key");
    check_text(text, "the metadata text");
  }
  Header header{std::move(entries), std::move(metadata), 0};
  header.data_begin = static_cast<int64_t>(header_bytes(header).size());
  return header;
}

std::string header_bytes(const Header& header) {
  std::string out(static_cast<size_t>(kLengthBytes), '\0');
  out += '{';
  if (!header.metadata.empty()) append_metadata(out, header.metadata);
  const char* comma = header.metadata.empty() ? "" : ",";
  for (const Entry& entry : header.entries) {
    out += comma;
    append_entry(out, entry);
    comma = ",";
  }
  out += '}';
  out.resize((out.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment, ' ');
  const uint64_t length = out.size() - static_cast<size_t>(kLengthBytes);
  if (length > static_cast<uint64_t>(kMostHeaderBytes)) {
    fail(Code::kInvalidArgument,
         "{} tensors make a header of {} bytes; readers take {} at most. Save into several files: max_shard_size=", header.entries.size(),
         length, kMostHeaderBytes);
  }
  std::memcpy(out.data(), &length, sizeof length);
  return out;
}

}  // namespace shardow::file
