#include "file/raw.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/paths.h"
#include "comm/wire.h"
#include "file/header.h"
#include "file/names.h"

namespace shardow::file {
namespace {

using base::fail;
using base::File;
using base::Path;
using comm::Receiver;
using comm::Sender;

/// Also where a save died, or is, between the two renames that replace a directory.
File open_standing(const Path& path) {
  for (int left = 4;; --left) {
    try {
      return File::open(standing(path));
    } catch (const Error& error) {
      if (error.code() != Code::kNotFound || left == 0) throw;
    }
  }
}

/// A path as it was when it was opened: a file, or a directory in which names are looked up, wherever it has been moved
/// since.
struct Standing {
  std::optional<File> file;
  std::shared_ptr<const File> directory;

  explicit Standing(const Path& path) {
    File found = open_standing(path);
    if (found.is_directory()) {
      directory = std::make_shared<const File>(std::move(found));
    } else {
      file.emplace(std::move(found));
    }
  }

  std::optional<File> find(const std::string& name) const {
    try {
      return File::open_in(*directory, name);
    } catch (const Error& error) {
      if (error.code() != Code::kNotFound) throw;
      return std::nullopt;
    }
  }
};

void add(Raw& raw, File file, const std::shared_ptr<const File>& directory) {
  const base::Identity before = file.identity();
  HeaderText text = read_header(file);
  raw.files.push_back({file.path().string(), std::move(text.json), text.data_bytes, before});
  raw.opened.push_back(std::make_shared<Opened>(std::move(file), directory));
}

/// Which files of a directory there are. `index`: in which state it was read.
std::set<std::string> names_in(const Standing& place, Raw& raw, std::optional<base::Identity>& index) {
  std::set<std::string> names;
  if (const std::optional<File> found = place.find(kIndexName)) {
    index = found->identity();
    raw.weights = read_index(*found);
    for (const auto& [tensor, file] : *raw.weights) names.insert(file);
  } else {
    names.insert(kSingleName);
  }
  return names;
}

/// True where the path leads to another directory than `place`, or its index is another one than it was.
bool is_replaced(const Path& path, const Standing& place, const std::optional<base::Identity>& index) {
  try {
    const Standing now(path);
    if (!now.directory) return true;
    const base::Identity here = now.directory->identity(), there = place.directory->identity();
    if (here.device != there.device || here.inode != there.inode) return true;
    const std::optional<File> found = now.find(kIndexName);
    return index != (found ? std::optional(found->identity()) : std::nullopt);
  } catch (const Error&) {
    return true;
  }
}

/// A directory in which nothing is kept is kNotFound: programs start anew there. One that has something, and not this,
/// never is.
[[noreturn]] void fail_missing(const Path& directory, const std::string& name, const Raw& raw, bool is_given) {
  if (raw.weights) fail(Code::kCorrupt, "{} is not there, though the index names it", (directory / name).string());
  std::vector<std::string> there = base::names_in(standing(directory));
  std::erase_if(there, [](const std::string& one) { return one.starts_with('.') || !one.ends_with(".safetensors"); });
  std::sort(there.begin(), there.end());
  const std::string others = there.empty() ? "" : fmt::format("; what is there: {}", fmt::join(there, ", "));
  if (is_given)
    fail(there.empty() ? Code::kNotFound : Code::kCorrupt, "{} is not there{}", (directory / name).string(), others);
  fail(there.empty() ? Code::kNotFound : Code::kInvalidArgument, "{} has neither {} nor {}{}", directory.string(),
       kIndexName, kSingleName, others);
}

/// Nothing where the path was replaced meanwhile.
std::optional<Raw> read_directory(const Path& path, const Standing& place, const std::vector<std::string>& given) {
  Raw raw;
  std::optional<base::Identity> index;
  const std::set<std::string> found = given.empty() ? names_in(place, raw, index) : std::set<std::string>();
  const std::vector<std::string> names = given.empty() ? std::vector<std::string>(found.begin(), found.end()) : given;
  for (const std::string& name : names) {
    std::optional<File> file = place.find(name);
    if (!file && is_replaced(path, place, index)) return std::nullopt;
    if (!file) fail_missing(path, name, raw, !given.empty());
    add(raw, std::move(*file), place.directory);
  }
  return raw;
}

bool is_same(const File& file, const Raw::Text& text, bool same_machine) {
  if (same_machine) return file.identity() == text.identity;
  if (file.size() != text.identity.size) return false;
  return read_header(file).json == text.json;
}

}  // namespace

Raw read_raw(const Path& path, const std::vector<std::string>& names) {
  constexpr int kAttempts = 100;  // of a path that is replaced each time
  for (int left = kAttempts; left > 0; --left) {
    Standing place(path);
    if (place.directory) {
      if (std::optional<Raw> raw = read_directory(path, place, names)) return std::move(*raw);
      continue;
    }
    if (!names.empty())
      fail(Code::kInvalidArgument, "{} is a file; a directory with {} is needed", path.string(),
           fmt::join(names, ", "));
    Raw raw;
    add(raw, std::move(*place.file), nullptr);
    return raw;
  }
  fail(Code::kIo, "{} was replaced {} times while it was opened", path.string(), kAttempts);
}

bool open_same(const Path& path, Raw& raw, bool same_machine) {
  raw.opened.clear();
  Standing place(path);
  for (const Raw::Text& text : raw.files) {
    const bool inside = Path(text.path) != path && Path(text.path) != standing(path);
    if (inside != (place.directory != nullptr)) return false;
    std::optional<File> file = inside ? place.find(Path(text.path).filename().string()) : std::move(place.file);
    if (!file || !is_same(*file, text, same_machine)) return false;
    raw.opened.push_back(std::make_shared<Opened>(std::move(*file), place.directory));
  }
  return true;
}

std::string pack_raw(const Raw& raw) {
  Sender out;
  out.number(static_cast<int64_t>(raw.files.size()));
  for (const Raw::Text& file : raw.files) {
    out.text(file.path);
    out.text(file.json);
    out.number(file.data_bytes);
    out.number(static_cast<int64_t>(file.identity.device));
    out.number(static_cast<int64_t>(file.identity.inode));
    out.number(file.identity.size);
    out.number(file.identity.modified);
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

Raw unpack_raw(std::string_view bytes) {
  Receiver in(bytes);
  Raw raw;
  for (int64_t left = in.number(); left > 0; --left) {
    Raw::Text& text = raw.files.emplace_back();
    text.path = in.text();
    text.json = in.text();
    text.data_bytes = in.number();
    text.identity.device = static_cast<uint64_t>(in.number());
    text.identity.inode = static_cast<uint64_t>(in.number());
    text.identity.size = in.number();
    text.identity.modified = in.number();
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

}  // namespace shardow::file
