// For tests in which one version of a checkpoint replaces another: the ways to save, and which version a reader finds.
#pragma once

#include <string>
#include <vector>

#include "file/checkpoint_fixture.h"
#include "file/names.h"

namespace shardow::versions {

inline const char* const kText = "checkpoint.json";  // appears with a directory
inline const std::vector<Spec> kSmall = {
    {"a", DType::kF32, {40, 900}}, {"b", DType::kBF16, {30, 11}}, {"c", DType::kF64, {5}}};

struct Way {
  const char* name;
  bool directory, exchange = true, first = false;
  SaveOptions options = {};
  std::vector<std::string> names = {};  ///< of files with names of their own
};

inline std::vector<Way> ways() {
  const SaveOptions shards{.max_shard_size = 1000};
  SaveOptions front_to_end = shards;
  front_to_end.sequential = true;
  const std::vector<std::string> names = {"ema-0.9.safetensors", "ema-0.99.safetensors"};
  return {{"a file", false},
          {"a file where there was none", false, true, true},
          {"a file from front to end", false, true, false, {.sequential = true}},
          {"a directory", true, true, false, shards},
          {"a directory where there was none", true, true, true, shards},
          {"a directory without exchange", true, false, false, shards},
          {"a directory from front to end", true, true, false, front_to_end},
          {"several files", true, true, false, {}, names},
          {"several files without exchange", true, false, false, {}, names}};
}

inline fs::path target(const Way& way) {
  return way.directory ? "model" : "model.safetensors";
}

/// Of the global `version`.
inline std::vector<Held> values(const std::vector<Spec>& specs, const Sharding& sharding, int rank, int ranks) {
  std::vector<Held> held;
  for (const Spec& spec : specs) {
    Held& one = held.emplace_back(spec.name, spec.dtype, sharding(spec.shape, rank, ranks));
    const int64_t size = dtype_bits(spec.dtype) / 8;
    one.view.region.for_each_run([&](const shardow::Run& run) {
      for (int64_t i = 0; i < run.length * size; ++i)
        one.memory[static_cast<size_t>(run.local_begin * size + i)] = value(spec, run.global_begin * size + i);
    });
  }
  return held;
}

/// Collective.
inline void save_version(Group& group, std::vector<Held>& held, int which, const Way& way, const fs::path& folder) {
  std::vector<SaveFile> files;
  for (const std::string& name : way.names) files.push_back({name, views_of(held)});
  if (files.empty()) files.push_back({"", views_of(held)});
  SaveOptions options = way.options;
  if (way.directory) options.texts[kText] = std::to_string(which);
  save(group, files, folder / target(way), options);
}

/// 1, 2 or 3; 0 where nothing is there; -1 for anything else.
inline int version_at(const fs::path& path, const std::vector<Spec>& specs = kSmall) {
  for (const int which : {1, 2, 3}) {
    version = which;
    auto read = values(specs, whole, 0, 1), expected = values(specs, whole, 0, 1);
    for (Held& one : read) std::fill(one.memory.begin(), one.memory.end(), std::byte{0xee});
    try {
      load(*solo(), views_of(read), path);
    } catch (const Error& error) {
      return error.code() == Code::kNotFound && !fs::exists(path) ? 0 : -1;
    }
    bool same = true;
    for (size_t i = 0; i < read.size(); ++i) same = same && read[i].memory == expected[i].memory;
    if (same) return which;
  }
  return -1;
}

/// The same of all files of a way, which must agree.
inline int version_of(const fs::path& folder, const Way& way, const std::vector<Spec>& specs = kSmall) {
  const fs::path path = folder / target(way);
  const auto of_files = [&] {
    if (way.names.empty()) return version_at(path, specs);
    const int first = version_at(path / way.names[0], specs), second = version_at(path / way.names[1], specs);
    return first == second ? first : -1;
  };
  const int found = of_files();
  return found > 0 && way.directory && bytes_of(file::standing(path) / kText) != std::to_string(found) ? -1 : found;
}

}  // namespace shardow::versions
