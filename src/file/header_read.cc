// simdjson checks UTF-8 and the whole document and keeps duplicate keys visible; what remains are the format's own
// rules.
#include <simdjson.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "file/header.h"
#include "file/members.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;
using simdjson::dom::element;
using simdjson::dom::element_type;

constexpr size_t kMostEntryBytes = size_t{1} << 20;  // of JSON that describes one tensor, whose name aside
constexpr size_t kMostTexts = 1'000'000;             // in the metadata
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

template <typename... Args>
[[noreturn]] void corrupt(std::string_view where, fmt::format_string<Args...> message, Args&&... args) {
  fail(Code::kCorrupt, "{}: {}", where, fmt::format(message, std::forward<Args>(args)...));
}

/// True for a "-0" outside of strings: simdjson reads it as the integer 0, the reference parser as a float, which is no
/// size.
bool has_negative_zero(std::string_view json) {
  if (json.find("-0") == std::string_view::npos) return false;
  bool quoted = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (quoted && c == '\\') {
      ++i;
    } else if (c == '"') {
      quoted = !quoted;
    } else if (!quoted && c == '-' && i + 1 < json.size() && json[i + 1] == '0') {
      return true;
    }
  }
  return false;
}

int64_t to_size(element value, std::string_view where, std::string_view name, const char* what) {
  if (value.type() == element_type::UINT64)
    corrupt(where, "tensor '{}': {} {} is too large", name, what, uint64_t(value));
  if (value.type() != element_type::INT64 || int64_t(value) < 0)
    corrupt(where, "tensor '{}': {} is no unsigned integer", name, what);
  return int64_t(value);
}

Shape to_shape(element value, std::string_view where, std::string_view name) {
  if (!value.is_array()) corrupt(where, "tensor '{}': its shape is no list", name);
  Shape shape;
  for (const element size : value.get_array()) shape.push_back(to_size(size, where, name, "a size in its shape"));
  return shape;
}

std::pair<int64_t, int64_t> to_offsets(element value, std::string_view where, std::string_view name) {
  if (!value.is_array() || value.get_array().size() != 2)
    corrupt(where, "tensor '{}': its data_offsets are not two numbers", name);
  const simdjson::dom::array both = value.get_array();
  return {to_size(both.at(0), where, name, "a data_offset"), to_size(both.at(1), where, name, "a data_offset")};
}

__extension__ using Wide = unsigned __int128;

/// Bytes of a dense tensor.
int64_t size_of(const Entry& entry, std::string_view where) {
  Wide bits = static_cast<unsigned>(dtype_bits(entry.dtype));
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return 0;
  for (const int64_t size : entry.shape) {
    bits *= static_cast<uint64_t>(size);
    if (bits / 8 > static_cast<Wide>(kMost))
      corrupt(where, "tensor '{}' of shape [{}] has more bytes than 2^63", entry.name, fmt::join(entry.shape, ", "));
  }
  if (bits % 8 != 0)
    corrupt(where, "tensor '{}' of shape [{}] is no whole number of bytes", entry.name, fmt::join(entry.shape, ", "));
  return static_cast<int64_t>(bits / 8);
}

/// `keys`: room for those of its description.
Entry to_entry(std::string_view name, element value, std::string_view where, std::vector<std::string_view>& keys) {
  if (!value.is_object()) corrupt(where, "tensor '{}' is described by no object", name);
  std::optional<element> dtype, shape, offsets;
  keys.clear();
  for (const auto& [key, field] : value.get_object()) {
    keys.push_back(key);
    if (key == "dtype") dtype = field;
    if (key == "shape") shape = field;
    if (key == "data_offsets") offsets = field;
  }
  std::sort(keys.begin(), keys.end());
  if (const auto twice = std::adjacent_find(keys.begin(), keys.end()); twice != keys.end())
    corrupt(where, "tensor '{}' has '{}' twice", name, *twice);
  if (!dtype || !shape || !offsets)
    corrupt(where, "tensor '{}' lacks its {}", name, !dtype ? "dtype" : !shape ? "shape" : "data_offsets");
  if (!dtype->is_string()) corrupt(where, "tensor '{}': its dtype is no text", name);
  const std::string_view spelled = dtype->get_string();
  const std::optional<DType> known = find_dtype(spelled);
  if (!known) corrupt(where, "tensor '{}' has the unknown dtype '{}'", name, spelled);
  Entry entry{std::string(name), *known, to_shape(*shape, where, name), 0, 0};
  std::tie(entry.begin, entry.end) = to_offsets(*offsets, where, name);
  if (entry.shape.size() > static_cast<size_t>(kMaxDims))
    corrupt(where, "tensor '{}' has {} dimensions; {} is the most", name, entry.shape.size(), kMaxDims);
  return entry;
}

Metadata to_metadata(std::string_view json, std::string_view where) {
  Metadata metadata;
  if (json == "null") return metadata;
  if (!json.starts_with('{')) corrupt(where, "__metadata__ is no object");
  Members members(json, kMostDepth - 2);
  while (members.next()) {
    element value;
    const bool is_text = members.text().starts_with('"');
    if (members.parse(value) && !is_text) corrupt(where, "__metadata__ '{}' is no text", members.key());
    if (!members.error().empty()) break;
    if (!metadata.emplace(members.key(), std::string_view(value.get_string())).second)
      corrupt(where, "__metadata__ has '{}' twice", members.key());
    if (metadata.size() > kMostTexts) corrupt(where, "its __metadata__ has more than {} texts", kMostTexts);
  }
  if (!members.error().empty()) corrupt(where, "its header is no JSON: in __metadata__: {}", members.error());
  return metadata;
}

void refuse_twins(const std::vector<Entry>& entries, std::string_view where) {
  const auto not_ascending = [](const Entry& a, const Entry& b) { return a.name >= b.name; };
  if (std::adjacent_find(entries.begin(), entries.end(), not_ascending) == entries.end())
    return;  // as most files have them
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const Entry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    corrupt(where, "'{}' is there twice", *twice);
}

/// Ascending, adjacent, of the right sizes, and as much as there is.
void check_layout(std::vector<Entry>& entries, int64_t data_bytes, std::string_view where) {
  const auto before = [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  };
  if (!std::is_sorted(entries.begin(), entries.end(), before)) std::stable_sort(entries.begin(), entries.end(), before);
  int64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at || entry.end < entry.begin) {
      corrupt(where, "tensor '{}' has bytes [{}, {}) where byte {} should be its first: tensors lie one after another",
              entry.name, entry.begin, entry.end, at);
    }
    if (const int64_t size = size_of(entry, where); entry.end - entry.begin != size) {
      corrupt(where, "tensor '{}', {} of shape [{}], takes {} bytes and has {}", entry.name, dtype_name(entry.dtype),
              fmt::join(entry.shape, ", "), size, entry.end - entry.begin);
    }
    at = entry.end;
  }
  if (at != data_bytes)
    corrupt(where,
            "its tensors end at byte {} of the data, which has {} bytes: the file was cut off, or is something else as "
            "well",
            at, data_bytes);
}

}  // namespace

Header parse_header(std::string_view json, int64_t data_bytes, std::string_view where) {
  if (has_negative_zero(json)) corrupt(where, "-0 stands in its header, where only unsigned integers may");
  Header header;
  header.data_begin = kLengthBytes + static_cast<int64_t>(json.size());
  bool has_metadata = false;
  std::vector<std::string_view> keys;
  Members members(json, kMostDepth - 1);
  while (members.next()) {
    if (members.key() == "__metadata__") {
      if (std::exchange(has_metadata, true)) corrupt(where, "'__metadata__' is there twice");
      header.metadata = to_metadata(members.text(), where);
      continue;
    }
    if (members.text().size() > kMostEntryBytes)
      corrupt(where, "tensor '{}' is described by {} bytes; {} are the most", members.key(), members.text().size(),
              kMostEntryBytes);
    element value;
    if (!members.parse(value)) break;
    header.entries.push_back(to_entry(members.key(), value, where, keys));
  }
  if (!members.error().empty()) corrupt(where, "its header is no JSON object: {}", members.error());
  refuse_twins(header.entries, where);
  check_layout(header.entries, data_bytes, where);
  return header;
}

HeaderText read_header(const base::File& file) {
  const std::string where = file.path().string();
  const int64_t size = file.size();
  if (size < kLengthBytes) corrupt(where, "{} bytes are no safetensors file", size);
  uint64_t length = 0;
  file.read(std::as_writable_bytes(std::span(&length, 1)), 0);
  static_assert(std::endian::native == std::endian::little);
  constexpr uint64_t kZip = 0x04034b50;  // "PK" and two bytes, which are the low half of the word
  if ((length & 0xffffffff) == kZip) corrupt(where, "a zip file, such as torch.save() makes, is no safetensors file");
  if (length > static_cast<uint64_t>(kMostHeaderBytes))
    corrupt(where, "its header claims {} bytes; {} is the most", length, kMostHeaderBytes);
  if (static_cast<int64_t>(length) > size - kLengthBytes)
    corrupt(where, "its header claims {} bytes, the file has {}", length, size);
  std::string json(length, '\0');
  file.read(std::as_writable_bytes(std::span(json)), kLengthBytes);
  return {std::move(json), size - kLengthBytes - static_cast<int64_t>(length)};
}

}  // namespace shardow::file
