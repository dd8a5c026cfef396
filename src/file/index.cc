#include "file/index.h"

#include <simdjson.h>

#include <iterator>

#include "base/errors.h"
#include "file/json.h"

namespace shardow::file {
namespace {

using base::fail;
using simdjson::dom::element;

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\\') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

}  // namespace

WeightMap parse_index(std::string_view json, std::string_view where) {
  simdjson::dom::parser parser;
  element root;
  if (const auto error = parser.parse(json.data(), json.size()).get(root))
    fail(Code::kCorrupt, "{}: no JSON: {}", where, simdjson::error_message(error));
  element map;
  if (!root.is_object() || root["weight_map"].get(map) != simdjson::SUCCESS || !map.is_object())
    fail(Code::kCorrupt, "{}: it has no weight_map", where);
  WeightMap weights;
  for (const auto& [name, value] : map.get_object()) {
    if (!value.is_string()) fail(Code::kCorrupt, "{}: '{}' is in no file", where, name);
    const std::string_view file = value.get_string();
    if (!is_plain_name(file)) {
      fail(Code::kCorrupt, "{}: '{}' is said to be in '{}'; only plain names of files beside the index are followed", where, name, file);
    }
    if (!weights.emplace(name, file).second) fail(Code::kCorrupt, "{}: '{}' is there twice", where, name);
  }
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
  std::string out = fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{", total_size);
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
