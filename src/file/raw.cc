#include "file/raw.h"

#include <algorithm>
#include <array>
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

constexpr std::array kLists = {kIndexName, kAveragesName, kManifestName};

/// A path as it was when it was opened: a file, or a directory in which names are looked up, wherever it has been moved
/// since.
struct Standing {
  std::optional<File> file;
  std::shared_ptr<const File> directory;

  explicit Standing(const Path& path) {
    File found = File::open(path);
    if (found.is_directory()) {
      directory = std::make_shared<const File>(std::move(found));
    } else {
      file.emplace(std::move(found));
    }
  }

  std::optional<File> find(const std::string& name) const {
    try {
      File file_in_directory = File::open_in(*directory, name);
      static_cast<void>(file_in_directory.size());  // throws for a directory or a pipe
      return file_in_directory;
    } catch (const Error& error) {
      if (base::is_of_no_file(error)) fail(Code::kCorrupt, "{}; a checkpoint has a file there", error.what());
      if (error.code() != Code::kNotFound) throw;
      return std::nullopt;
    }
  }

  /// In which state the texts are that name files: other ones after each save. A text that can't be opened names none.
  std::array<std::optional<base::Identity>, kLists.size()> lists() const {
    std::array<std::optional<base::Identity>, kLists.size()> all;
    for (size_t i = 0; i < all.size(); ++i) {
      try {
        if (const auto list = find(kLists[i])) all[i] = list->identity();
      } catch (const Error&) {
      }
    }
    return all;
  }
};

/// What a save has called files that were asked for as `names`. Whatever else has such a name says nothing.
std::vector<std::string> called(const Path& directory, std::vector<std::string> names) {
  for (const char* const list : {kAveragesName, kManifestName}) {
    const auto listing = listing_in(directory, list);
    for (std::string& name : names) {
      if (!listing) break;
      if (const auto file = listing->files.find(name); file != listing->files.end()) name = file->second;
    }
  }
  return names;
}

void add(Raw& raw, File file, const std::shared_ptr<const File>& directory) {
  const base::Identity before = file.identity();
  HeaderText text = read_header(file);
  raw.files.push_back({file.path().string(), std::move(text.json), text.data_bytes, before});
  raw.opened.push_back(std::make_shared<Opened>(std::move(file), directory));
}

/// Which files of a directory there are.
std::vector<std::string> names_in(const Standing& place, Raw& raw) {
  const std::optional<File> index = place.find(kIndexName);
  if (!index) return {kSingleName};
  raw.weights = read_index(*index);
  std::set<std::string> names;
  for (const auto& [tensor, file] : *raw.weights) names.insert(file);
  return {names.begin(), names.end()};
}

/// A directory in which nothing is kept is kNotFound: programs start anew there. One that has something, and not this,
/// never is.
[[noreturn]] void fail_missing(const Path& directory, const std::string& name, const Raw& raw, bool is_given) {
  if (raw.weights) fail(Code::kCorrupt, "{} is not there, though the index names it", (directory / name).string());
  std::vector<std::string> there = base::names_in(directory);
  std::erase_if(there, [](const std::string& one) { return one.starts_with('.') || !one.ends_with(".safetensors"); });
  std::sort(there.begin(), there.end());
  const std::string others = there.empty() ? "" : fmt::format("; what is there: {}", fmt::join(there, ", "));
  if (is_given)
    fail(there.empty() ? Code::kNotFound : Code::kCorrupt, "{} is not there{}", (directory / name).string(), others);
  fail(there.empty() ? Code::kNotFound : Code::kInvalidArgument, "{} has neither {} nor {}{}", directory.string(),
       kIndexName, kSingleName, others);
}

/// Nothing where the path was replaced meanwhile, or a save has committed.
std::optional<Raw> read_directory(const Path& path, const std::vector<std::string>& given) {
  const Standing place(path);
  Raw raw;
  const auto before = place.lists();
  const auto is_old = [&] {
    try {
      const base::Identity now = File::open(path).identity(), then = place.directory->identity();
      return now.inode != then.inode || now.device != then.device || place.lists() != before;
    } catch (const Error&) {
      return true;
    }
  };
  for (const std::string& name : given.empty() ? names_in(place, raw) : called(path, given)) {
    std::optional<File> file = place.find(name);
    if (!file && is_old()) return std::nullopt;
    if (!file) fail_missing(path, name, raw, !given.empty());
    add(raw, std::move(*file), place.directory);
  }
  return raw.files.size() > 1 && is_old() ? std::nullopt : std::optional(std::move(raw));
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
    const Path folder = base::parent_of(path);
    const std::vector<std::string> own = {path.filename().string()};
    const bool elsewhere = names.empty() && own[0].ends_with(".safetensors") && called(folder, own) != own;
    Standing place(elsewhere ? folder : path);
    if (place.directory) {
      if (auto raw = read_directory(elsewhere ? folder : path, elsewhere ? own : names)) return std::move(*raw);
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
  if (raw.files.empty()) return true;
  const bool inside = Path(raw.files[0].path) != path;
  Standing place(inside ? base::parent_of(raw.files[0].path) : path);
  if (inside != (place.directory != nullptr)) return false;
  for (const Raw::Text& text : raw.files) {
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
