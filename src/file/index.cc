#include "file/index.h"

#include <utility>

#include "base/errors.h"
#include "file/json.h"
#include "file/members.h"

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

}  // namespace

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
  const base::Path& path = file.path();
  const int64_t size = file.size();
  if (size > kMostIndexBytes) fail(Code::kCorrupt, "{}: {} bytes are too many for an index", path.string(), size);
  std::string json(static_cast<size_t>(size), '\0');
  file.read(std::as_writable_bytes(std::span(json)), 0);
  return parse_index(json, path.string());
}

std::string index_bytes(const WeightMap& weights, int64_t total_size) {
  std::string out =
      fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{", total_size);
  const char* comma = "";
  for (const auto& [name, file] : weights) {
    out += comma;
    out += "\n    ";
    append_json_text(out, name);
    out += ": ";
    append_json_text(out, file);
    comma = ",";
  }
  return out += "\n  }\n}\n";
}

std::string shard_name(size_t index, size_t count) {
  return count == 1 ? kSingleName : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

}  // namespace shardow::file
