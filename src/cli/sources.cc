#include "cli/sources.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/errors.h"
#include "base/files.h"
#include "base/paths.h"
#include "file/index.h"

namespace shardow::cli {
namespace {

namespace fs = std::filesystem;

std::set<std::string> file_names(const Checkpoint& checkpoint) {
  std::set<std::string> names;
  for (const StoredFile& file : checkpoint.files()) names.insert(file.path.filename().string());
  return names;
}

/// A file that begins like one of other tools is said to be one: as a header of ours it makes no sense.
[[noreturn]] void say_what_it_is(const fs::path& path, const Error& error) {
  std::array<char, 8> first{};
  try {
    base::File::open(path).read(std::as_writable_bytes(std::span(first)), 0);
  } catch (const Error&) {  // shorter than that
  }
  const std::string_view begins(first.data(), first.size());
  constexpr std::string_view kLegacy = "\x80\x02\x8a\x0al\xfc\x9c\x46";
  const bool zip = begins.starts_with("PK\x03\x04") &&
                   begins.substr(4) != std::string_view("\0\0\0\0", 4);  // else the length of a header
  if (!zip && begins != kLegacy) throw error;
  base::fail(Code::kUnsupported,
             "{} is {}, as torch.save() writes, and no safetensors file; shardow.merge() in Python reads it",
             path.string(), zip ? "a ZIP archive" : "a pickle");
}

[[noreturn]] void find_nothing(const fs::path& path) {
  if (base::look_at(path / ".metadata")) {
    base::fail(Code::kUnsupported,
               "{}: there is no .safetensors file in this directory, but one of torch.distributed.checkpoint; "
               "shardow.merge() in Python reads it",
               path.string());
  }
  base::fail(Code::kNotFound, "{}: there is no .safetensors file in this directory", path.string());
}

}  // namespace

Checkpoint open_checkpoint(const fs::path& path) {
  try {
    return Checkpoint::open(path);
  } catch (const Error& error) {
    if (error.code() != Code::kCorrupt || base::leads_to_directory(path)) throw;
    say_what_it_is(path, error);
  }
}

std::vector<std::string> safetensors_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (std::string& name : base::names_in(directory)) {
    if (name.ends_with(".safetensors") && !name.starts_with('.')) names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool has_model(const fs::path& directory) {
  return base::look_at(directory / file::kIndexName) || base::look_at(directory / file::kSingleName);
}

std::vector<Source> open_sources(const fs::path& path) {
  if (!base::leads_to_directory(path)) return {{"", open_checkpoint(path)}};
  std::vector<Source> found;
  std::set<std::string> taken;
  if (has_model(path)) {
    found.push_back({"", Checkpoint::open(path)});
    taken = file_names(found[0].checkpoint);
  }
  std::vector<std::string> others;
  for (std::string& name : safetensors_in(path)) {
    if (!taken.contains(name)) others.push_back(std::move(name));
  }
  std::vector<Checkpoint> opened = others.empty() ? std::vector<Checkpoint>() : Checkpoint::open_files(path, others);
  for (size_t i = 0; i < others.size(); ++i) found.push_back({others[i], opened[i]});
  if (found.empty()) find_nothing(path);
  return found;
}

Checkpoint open_one(const fs::path& path) {
  if (!base::leads_to_directory(path) || has_model(path)) return open_checkpoint(path);
  const std::vector<std::string> names = safetensors_in(path);
  if (names.empty()) find_nothing(path);
  if (names.size() > 1)
    base::fail(Code::kInvalidArgument, "{} is no model but has {} files, {}; name one of them", path.string(),
               names.size(), fmt::join(names, ", "));
  return Checkpoint::open(path / names[0]);
}

std::string full_name(const Source& source, const std::string& name) {
  return source.label.empty() ? name : source.label + "/" + name;
}

}  // namespace shardow::cli
