#include "cli/sources.h"

#include <algorithm>
#include <set>

#include "base/errors.h"
#include "base/paths.h"
#include "file/index.h"
#include "file/names.h"

namespace shardow::cli {
namespace {

namespace fs = std::filesystem;

std::set<std::string> file_names(const Checkpoint& checkpoint) {
  std::set<std::string> names;
  for (const StoredFile& file : checkpoint.files()) names.insert(file.path.filename().string());
  return names;
}

}  // namespace

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
  const fs::path stands = file::standing(path);  // where a save died halfway, beside the path
  if (!base::leads_to_directory(stands)) return {{"", Checkpoint::open(path)}};
  std::vector<Source> found;
  std::set<std::string> taken;
  if (has_model(stands)) {
    found.push_back({"", Checkpoint::open(path)});
    taken = file_names(found[0].checkpoint);
  }
  std::vector<std::string> others;
  for (std::string& name : safetensors_in(stands)) {
    if (!taken.contains(name)) others.push_back(std::move(name));
  }
  std::vector<Checkpoint> opened = others.empty() ? std::vector<Checkpoint>() : Checkpoint::open_files(stands, others);
  for (size_t i = 0; i < others.size(); ++i) found.push_back({others[i], std::move(opened[i])});
  if (found.empty()) base::fail(Code::kNotFound, "{}: there is no .safetensors file in this directory", path.string());
  return found;
}

Checkpoint open_one(const fs::path& path) {
  const fs::path stands = file::standing(path);
  if (!base::leads_to_directory(stands) || has_model(stands)) return Checkpoint::open(path);
  const std::vector<std::string> names = safetensors_in(stands);
  if (names.empty()) base::fail(Code::kNotFound, "{}: there is no .safetensors file in this directory", path.string());
  if (names.size() > 1)
    base::fail(Code::kInvalidArgument, "{} is no model but has {} files, {}; name one of them", path.string(), names.size(),
               fmt::join(names, ", "));
  return Checkpoint::open(stands / names[0]);
}

std::string full_name(const Source& source, const std::string& name) {
  return source.label.empty() ? name : source.label + "/" + name;
}

}  // namespace shardow::cli
