#include "file/catalog.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/machine.h"
#include "base/paths.h"
#include "file/header.h"
#include "file/index.h"
#include "file/layout.h"
#include "file/members.h"
#include "file/names.h"
#include "file/opened.h"
#include "group/ranks.h"
#include "group/wire.h"

namespace shardow::file {
namespace {

using base::fail;
using base::File;
using base::Path;
using group::Receiver;
using group::Sender;

/// One version of a checkpoint, also where it is replaced while it is read.
struct Raw {
  struct Text {
    std::string path, json;
    int64_t data_bytes;
    base::Identity identity;
  };
  std::vector<Text> files;
  std::optional<WeightMap> weights;             ///< where an index says who has what
  std::vector<std::shared_ptr<Opened>> opened;  ///< by file, on this rank; not packed
};

/// One version of each path, as rank 0 has read it for all.
struct Versions {
  Location location;
  std::string machine;   ///< rank 0's
  std::vector<Raw> raw;  ///< by path
};

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

/// Of a file, or of a directory with an index or with model.safetensors; with `names`, of these files of a directory.
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

/// Opens here what another rank has read. False where `path` has led to another version by then. On the same machine
/// that is told by the files' identities, else by their sizes and headers, which carry the checksums.
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

/// For other ranks.
std::string pack(const Versions& versions) {
  Sender out;
  out.text(versions.location.words);
  out.text(versions.machine);
  out.number(static_cast<int64_t>(versions.location.names.size()));
  for (const std::string& name : versions.location.names) out.text(name);
  for (size_t i = 0; i < versions.raw.size(); ++i) {
    const auto& [files, weights, opened] = versions.raw[i];
    out.text(versions.location.paths[i].string());
    out.number(static_cast<int64_t>(files.size()));
    for (const Raw::Text& file : files) {
      out.text(file.path);
      out.text(file.json);
      for (const auto number : {file.data_bytes, static_cast<int64_t>(file.identity.device),
                                static_cast<int64_t>(file.identity.inode), file.identity.size, file.identity.modified})
        out.number(number);
    }
    out.number(weights ? 1 : 0);
    if (weights) out.map(*weights);
  }
  return out.bytes();
}

Versions unpack(std::string_view bytes) {
  Receiver in(bytes);
  Versions versions;
  versions.location.words = in.text();
  versions.machine = in.text();
  versions.location.names.resize(static_cast<size_t>(in.number()));
  for (std::string& name : versions.location.names) name = in.text();
  while (!in.done()) {
    versions.location.paths.emplace_back(in.text());
    Raw& raw = versions.raw.emplace_back();
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
    if (in.number() != 0) raw.weights = in.map();
  }
  return versions;
}

using Checksums = std::unordered_map<std::string, uint32_t>;

/// By tensor. Of one name the first stays.
Checksums checksums_in(const Metadata& metadata, const std::string& where) {
  Checksums found;
  const auto text = metadata.find(kChecksums);
  if (text == metadata.end()) return found;
  constexpr size_t kDigits = 10;  // with their quotes
  Members members(text->second, 1);
  while (members.next()) {
    const std::string_view value = members.text();
    uint32_t crc = 0;
    const bool is_text = value.size() == kDigits && value.front() == '"' && value.back() == '"';
    if (!is_text || std::from_chars(value.data() + 1, value.data() + 9, crc, 16).ptr != value.data() + 9)
      fail(Code::kCorrupt, "{}: the checksum of '{}' is not 8 hexadecimal digits", where, members.key());
    found.emplace(members.key(), crc);
  }
  if (!members.error().empty())
    fail(Code::kCorrupt, "{}: {} is no JSON object: {}", where, kChecksums, members.error());
  return found;
}

/// Of files [begin, end).
Catalog to_catalog(const Raw& raw, const std::string& path, size_t begin, size_t end) {
  Catalog catalog;
  catalog.path = path;
  std::vector<Stored> tensors;
  for (size_t f = begin; f < end; ++f) {
    const Raw::Text& file = raw.files[f];
    Header header = parse_header(file.json, file.data_bytes, file.path);
    const Checksums crcs = checksums_in(header.metadata, file.path);
    header.metadata.erase(kChecksums);
    const auto written_by = header.metadata.extract(kWrittenBy);
    catalog.files.push_back({raw.opened[f], header.data_begin, std::move(header.metadata),
                             written_by.empty() ? std::string() : written_by.mapped()});
    if (f == begin) tensors.reserve(header.entries.size());
    for (Entry& entry : header.entries) {
      if (raw.weights) {
        const auto said = raw.weights->find(entry.name);
        if (said == raw.weights->end() || said->second != Path(file.path).filename().string())
          continue;  // the index does not name it: it is not there
      }
      const auto crc = crcs.find(entry.name);
      tensors.push_back({f - begin, std::move(entry), crc == crcs.end() ? std::nullopt : std::optional(crc->second)});
    }
  }
  catalog.tensors = StoredTensors(std::move(tensors));
  if (raw.weights) {
    for (const auto& [tensor, file] : *raw.weights) {
      if (catalog.tensors.find(tensor) == nullptr)
        fail(Code::kCorrupt, "the index says that '{}' is in {}, which does not have it", tensor, file);
    }
  }
  return catalog;
}

constexpr size_t kFewBytes = 64 << 10;  // of a fact, which goes through one store; what is longer travels by itself

/// (1) Rank 0 reads what is there, for all.
class ReadByFirst final : public group::Comparison {
 public:
  ReadByFirst(const group::CollectiveCall& call, const std::function<Location()>& find) : call_(call), find_(find) {}

  std::string words() override {
    if (call_.rank() != 0) return "";
    versions = {find_(), base::view_of_files(), {}};
    for (const Path& path : versions.location.paths) versions.raw.push_back(read_raw(path, versions.location.names));
    if (call_.size() > 1) text_ = pack(versions);
    Sender out;
    out.number(static_cast<int64_t>(text_.size()));
    if (text_.size() <= kFewBytes) out.text(text_);
    return out.bytes();
  }

  std::string sum_up(const std::vector<std::string>& by_rank) const override { return by_rank.front(); }

  void take(group::CollectiveCall& call, const std::string& total) override {
    Receiver in(total);
    const auto size = static_cast<size_t>(in.number());
    if (size > kFewBytes) {
      text_.resize(size);
      group::ranks_of(call.group()).broadcast(std::as_writable_bytes(std::span(text_)), 0, call.deadline());
    }
    if (call.rank() != 0) versions = unpack(size > kFewBytes ? text_ : in.text());
  }

  Versions versions;

 private:
  const group::CollectiveCall& call_;
  const std::function<Location()>& find_;
  std::string text_;
};

/// Whether what is there is what rank 0 found.
bool is_found_here(const Path& path, Raw& raw, bool same_machine) {
  try {
    return open_same(path, raw, same_machine);
  } catch (const Error& error) {
    if (error.code() != Code::kNotFound) throw;
    throw Error(
        Code::kIo,
        fmt::format(
            "{}: rank 0 found it, and it is not there on {}: the path is not on storage that all machines share",
            path.string(), base::host_name()),
        ENOENT);
  }
}

Catalogs to_catalogs(const Versions& versions) {
  Catalogs catalogs;
  const auto add = [&](const Raw& raw, const std::string& path, size_t begin, size_t end) {
    catalogs.push_back(std::make_shared<const Catalog>(to_catalog(raw, path, begin, end)));
  };
  for (size_t i = 0; i < versions.raw.size(); ++i) {
    const Raw& raw = versions.raw[i];
    if (versions.location.names.empty()) add(raw, versions.location.paths[i].string(), 0, raw.files.size());
    for (size_t f = 0; f < versions.location.names.size(); ++f) add(raw, raw.files[f].path, f, f + 1);
  }
  return catalogs;
}

/// The path that this rank does not find as rank 0 found it, with the rank; empty: there is none.
std::string missed_here(Versions& versions, int rank) {
  const bool same_machine = !versions.machine.empty() && versions.machine == base::view_of_files();
  for (size_t i = 0; rank != 0 && i < versions.raw.size(); ++i) {
    const Path& path = versions.location.paths[i];
    if (!is_found_here(path, versions.raw[i], same_machine))
      return fmt::format("{}: rank {} on {}", path.string(), rank, base::host_name());
  }
  return {};
}

}  // namespace

const Metadata& Catalog::metadata() const {
  static const Metadata none;
  return files.empty() ? none : files.front().metadata;
}

const Stored& Catalog::find(std::string_view name) const {
  const Stored* const found = tensors.find(name);
  if (found == nullptr) fail(Code::kNotFound, "{} has no tensor '{}'", path, name);
  return *found;
}

StoredTensors::StoredTensors(std::vector<Stored> all) : all_(std::move(all)) {
  const auto before = [](const Stored& a, const Stored& b) { return a.entry.name < b.entry.name; };
  const auto not_before = [&](const Stored& a, const Stored& b) { return !before(a, b); };
  if (std::adjacent_find(all_.begin(), all_.end(), not_before) == all_.end()) return;  // as most stand
  std::stable_sort(all_.begin(), all_.end(), before);
  const auto same = [](const Stored& a, const Stored& b) { return a.entry.name == b.entry.name; };
  all_.erase(std::unique(all_.begin(), all_.end(), same), all_.end());
}

const Stored* StoredTensors::find(std::string_view name) const noexcept {
  const auto before = [](const Stored& a, std::string_view b) { return a.entry.name < b; };
  const auto at = std::lower_bound(all_.begin(), all_.end(), name, before);
  return at == all_.end() || at->entry.name != name ? nullptr : &*at;
}

Catalogs Finding::run(group::CollectiveCall& call) const {
  constexpr int kAttempts = 50;
  std::string sum;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    ReadByFirst read(call, find);
    call.compare([&] {
      group::Comparisons parts = attempt == 0 && compared ? compared() : group::Comparisons();
      parts.push_back(&read);
      return parts;
    });
    Catalogs catalogs;
    group::Joint joint;
    const auto open_here = [&] {  // (2) every rank opens the same
      if (const std::string missed = missed_here(read.versions, call.rank()); !missed.empty()) return "-" + missed;
      catalogs = to_catalogs(read.versions);
      if (opened) joint = group::Joint(opened(read.versions.location, catalogs));
      const std::string words = joint.words();
      return words.empty() ? words : "+" + words;
    };
    const auto together = [&](std::vector<std::string> by_rank) {
      for (std::string& words : by_rank) {
        if (words.starts_with('-')) return words;  // the rank came too late for the version
        if (!words.empty()) words.erase(0, 1);
      }
      return "+" + joint.sum_up(by_rank);
    };
    sum = call.step(open_here, together);
    if (sum.starts_with('-')) continue;
    joint.take(call, sum.empty() ? sum : sum.substr(1));
    return catalogs;
  }
  const std::string message = fmt::format(
      "{} does not find what rank 0 found, {} times; is it replaced all the time, or not on storage that all machines "
      "share?",
      sum.substr(1), kAttempts);
  throw Error(Code::kIo, message, ESTALE);
}

Catalogs share_catalogs(Group& group, const Path& path, const std::vector<std::string>& names,
                        std::chrono::milliseconds timeout) {
  group::CollectiveCall call(group, timeout);
  return Finding{{}, [&] { return Location{{path}, names}; }}.run(call);
}

}  // namespace shardow::file
