#include "file/catalog.h"

#include <simdjson.h>

#include <charconv>
#include <set>
#include <span>

#include "base/errors.h"
#include "file/index.h"
#include "file/layout.h"
#include "file/together.h"
#include "file/wire.h"

namespace shardow::file {
namespace {

using base::fail;
using base::Path;
namespace fs = std::filesystem;

/// What rank 0 reads and sends: headers as they stand in the files, each with the length of its data.
struct Raw {
  struct Text {
    std::string path, json;
    int64_t data_bytes;
  };
  std::vector<Text> files;
  std::optional<WeightMap> weights;  ///< where an index says who has what
};

Raw::Text read_text(const Path& path) {
  HeaderText text = read_header(base::File::open(path));
  return {path.string(), std::move(text.json), text.data_bytes};
}

Raw read_raw(const Path& path) {
  Raw raw;
  if (!fs::is_directory(path)) {
    raw.files.push_back(read_text(path));
  } else if (fs::exists(path / kIndexName)) {
    raw.weights = read_index(path / kIndexName);
    std::set<std::string> names;
    for (const auto& [tensor, file] : *raw.weights) names.insert(file);
    for (const std::string& name : names) raw.files.push_back(read_text(path / name));
  } else if (fs::exists(path / kSingleName)) {
    raw.files.push_back(read_text(path / kSingleName));
  } else {
    fail(Code::kNotFound, "{} has neither {} nor {}", path.string(), kIndexName, kSingleName);
  }
  return raw;
}

std::string pack(const Raw& raw) {
  Sender out;
  out.number(static_cast<int64_t>(raw.files.size()));
  for (const Raw::Text& file : raw.files) {
    out.text(file.path);
    out.text(file.json);
    out.number(file.data_bytes);
  }
  out.number(raw.weights ? 1 : 0);
  if (raw.weights) {
    for (const auto& [tensor, file] : *raw.weights) {
      out.text(tensor);
      out.text(file);
    }
  }
  return out.bytes();
}

Raw unpack(std::string_view bytes) {
  Receiver in(bytes);
  Raw raw;
  for (int64_t left = in.number(); left > 0; --left) {
    std::string path = in.text(), json = in.text();
    raw.files.push_back({std::move(path), std::move(json), in.number()});
  }
  if (in.number() != 0) {
    raw.weights.emplace();
    while (!in.done()) {
      std::string tensor = in.text();
      raw.weights->emplace(std::move(tensor), in.text());
    }
  }
  return raw;
}

std::map<std::string, uint32_t> checksums_in(const Metadata& metadata, const std::string& where) {
  std::map<std::string, uint32_t> found;
  const auto text = metadata.find(kChecksums);
  if (text == metadata.end()) return found;
  simdjson::dom::parser parser;
  simdjson::dom::object object;
  if (parser.parse(text->second).get(object) != simdjson::SUCCESS) fail(Code::kCorrupt, "{}: {} is no JSON object", where, kChecksums);
  for (const auto& [name, value] : object) {
    std::string_view digits;
    uint32_t crc = 0;
    const bool is_text = value.get(digits) == simdjson::SUCCESS;
    if (!is_text || digits.size() != 8 || std::from_chars(digits.data(), digits.data() + 8, crc, 16).ptr != digits.data() + 8) {
      fail(Code::kCorrupt, "{}: the checksum of '{}' is not 8 hexadecimal digits", where, name);
    }
    found.emplace(name, crc);
  }
  return found;
}

Catalog to_catalog(const Raw& raw, const Path& path) {
  Catalog catalog;
  catalog.path = path.string();
  for (size_t f = 0; f < raw.files.size(); ++f) {
    const Raw::Text& file = raw.files[f];
    Header header = parse_header(file.json, file.data_bytes, file.path);
    const std::map<std::string, uint32_t> crcs = checksums_in(header.metadata, file.path);
    catalog.files.push_back({file.path, header.data_begin});
    for (Entry& entry : header.entries) {
      if (raw.weights) {
        const auto said = raw.weights->find(entry.name);
        if (said == raw.weights->end() || said->second != Path(file.path).filename().string())
          continue;  // the index does not name it: it is not there
      }
      const auto crc = crcs.find(entry.name);
      std::string name = entry.name;
      catalog.tensors.emplace(std::move(name), Stored{f, std::move(entry), crc == crcs.end() ? std::nullopt : std::optional(crc->second)});
    }
    if (f == 0) catalog.metadata = std::move(header.metadata);
  }
  catalog.metadata.erase(kChecksums);
  if (raw.weights) {
    for (const auto& [tensor, file] : *raw.weights) {
      if (!catalog.tensors.contains(tensor))
        fail(Code::kCorrupt, "the index says that '{}' is in {}, which does not have it", tensor, file);
    }
  }
  return catalog;
}

}  // namespace

Catalog share_catalog(Group& group, const Path& path, std::chrono::milliseconds timeout) {
  std::string bytes;
  together(group, timeout, [&] {
    if (group.rank() == 0) bytes = pack(read_raw(path));
  });
  const auto deadline = [&] { return std::chrono::steady_clock::now() + timeout; };
  uint64_t size = bytes.size();
  group.all_reduce(std::span(&size, 1), Group::Op::kMax, deadline());
  bytes.resize(size);
  group.broadcast(std::as_writable_bytes(std::span(bytes)), 0, deadline());
  return to_catalog(unpack(bytes), path);
}

}  // namespace shardow::file
