#include "file/index.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "file/json.h"
#include "file/members.h"
#include "file/names.h"

namespace shardow::file {
namespace {

using base::fail;
using simdjson::dom::element;

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\\') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

WeightMap to_map(std::string_view json, std::string_view where) {
  WeightMap weights;
  Members members(json, 1);
  while (members.next()) {
    element value;
    std::string_view file;
    if (!members.parse(value)) break;
    if (value.get(file) != simdjson::SUCCESS) fail(Code::kCorrupt, "{}: '{}' is in no file", where, members.key());
    if (!is_plain_name(file)) {
      fail(Code::kCorrupt, "{}: '{}' is said to be in '{}'; only plain names of files beside the index are followed",
           where, members.key(), file);
    }
    if (!weights.emplace(members.key(), file).second)
      fail(Code::kCorrupt, "{}: '{}' is there twice", where, members.key());
  }
  if (!members.error().empty()) fail(Code::kCorrupt, "{}: no JSON: {}", where, members.error());
  return weights;
}

std::string text_of(const base::File& file) {
  if (const int64_t size = file.size(); size > kMostIndexBytes)
    fail(Code::kCorrupt, "{}: {} bytes are too many for an index", file.path().string(), size);
  return file.text();
}

constexpr const char *kFiles = "shardow.files", *kReplaces = "shardow.replaces";
constexpr std::string_view kOldFiles = "files";  // a manifest's own list, which has them under the names asked for

void append_array(std::string& out, const std::set<std::string>& texts) {
  const char* comma = "[";
  for (const std::string& text : texts) {
    out += std::exchange(comma, ", ");
    append_json_text(out, text);
  }
  out += ']';
}

/// Calls `fn(key, file)` for each plain name of a .safetensors file in an object or an array, whose keys are its
/// values.
template <class Fn>
void for_each_file(const element& value, Fn fn) {
  const auto take = [&](std::string_view key, const element& member) {
    std::string_view file;
    if (member.get(file) == simdjson::SUCCESS && is_plain_name(file) && file.ends_with(".safetensors"))
      fn(std::string(key.empty() ? file : key), std::string(file));
  };
  if (simdjson::dom::object object; value.get(object) == simdjson::SUCCESS) {
    for (const auto& [key, member] : object) take(key, member);
  }
  if (simdjson::dom::array array; value.get(array) == simdjson::SUCCESS) {
    for (const element member : array) take({}, member);
  }
}

}  // namespace

bool Listing::names(const std::string& file) const {
  return std::any_of(files.begin(), files.end(), [&](const auto& one) { return one.second == file; });
}

Listing parse_listing(std::string_view json, std::string_view where) {
  Listing listing;
  Members root(json, kMostDepth);
  while (root.next()) {
    element value;
    const bool of_index = root.key() == "weight_map", known = of_index || root.key() == kFiles;
    if (!root.parse(value)) break;
    if (known || (root.key() == kOldFiles && where.ends_with(kManifestName))) {
      for_each_file(value, [&](std::string key, std::string file) {
        if (of_index) key = file;
        known ? listing.files.insert_or_assign(key, file) : listing.files.try_emplace(key, file);
      });
    } else if (root.key() == kReplaces) {
      for_each_file(value, [&](const std::string&, std::string file) { listing.replaced.insert(std::move(file)); });
    }
  }
  if (!root.error().empty()) fail(Code::kCorrupt, "{}: no JSON object: {}", where, root.error());
  return listing;
}

Listing read_listing(const base::File& file) {
  return parse_listing(text_of(file), file.path().string());
}

std::optional<Listing> listing_in(const base::Path& directory, const char* name) {
  try {
    return read_listing(base::File::open(directory / name));
  } catch (const Error& error) {
    if (error.code() != Code::kNotFound && error.code() != Code::kCorrupt && !base::is_of_no_file(error)) throw;
    return std::nullopt;
  }
}

std::string with_listing(std::string text, const Listing& listing) {
  text.erase(text.find_last_of('}'));
  while (text.ends_with('\n') || text.ends_with(' ')) text.pop_back();
  const char* comma = text.ends_with('{') ? "" : ", ";
  text += fmt::format("{}\"{}\": {{", comma, kFiles);
  append_members(text, listing.files, ", ", ": ");
  text += "}";
  if (!listing.replaced.empty()) {
    text += fmt::format(", \"{}\": ", kReplaces);
    append_array(text, listing.replaced);
  }
  return text + "}\n";
}

WeightMap parse_index(std::string_view json, std::string_view where) {
  WeightMap weights;
  bool has_map = false;
  Members root(json, kMostDepth);
  while (root.next()) {
    if (root.key() != "weight_map") {
      element ignored;
      root.parse(ignored);
      continue;
    }
    if (std::exchange(has_map, true)) fail(Code::kCorrupt, "{}: 'weight_map' is there twice", where);
    if (!root.text().starts_with('{')) fail(Code::kCorrupt, "{}: its weight_map is no object", where);
    weights = to_map(root.text(), where);
  }
  if (!root.error().empty()) fail(Code::kCorrupt, "{}: no JSON object: {}", where, root.error());
  if (!has_map) fail(Code::kCorrupt, "{}: it has no weight_map", where);
  return weights;
}

WeightMap read_index(const base::File& file) {
  return parse_index(text_of(file), file.path().string());
}

std::string index_bytes(const WeightMap& weights, int64_t total_size, const std::set<std::string>& replaced) {
  std::string out = fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n", total_size);
  if (!replaced.empty()) {
    out += fmt::format("  \"{}\": ", kReplaces);
    append_array(out, replaced);
    out += ",\n";
  }
  out += weights.empty() ? "  \"weight_map\": {" : "  \"weight_map\": {\n    ";
  append_members(out, weights, ",\n    ", ": ");
  return out += "\n  }\n}\n";
}

std::string shard_name(size_t index, size_t count) {
  return count == 1 ? kSingleName : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

}  // namespace shardow::file
