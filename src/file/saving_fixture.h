// For tests of what a save does to its directory: versions of one checkpoint, and files of others beside them.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "file/checkpoint_fixture.h"

namespace shardow {

inline constexpr const char* kNonce = "0123456789abcdef";

inline const SaveOptions kShards{.max_shard_size = 1 << 20};

class Saving : public Checkpoints {
 protected:
  ~Saving() override { version = 0; }

  void save_version(int which, const fs::path& path, const SaveOptions& options = {}) {
    version = which;
    ASSERT_EQ(save_as(path, rows, 2, options), all(2, kFine));
  }
  /// Saves files of at most a MiB with the calls of `machine`, which fails on both ranks.
  void fail_to_save_version(int which, const fs::path& path, base::Syscalls& machine) {
    machine_ = &machine;
    version = which;
    EXPECT_EQ(save_as(path, rows, 2, kShards), all(2, static_cast<int>(Code::kIo)));
    machine_ = nullptr;
  }
  void expect_version(int which, const fs::path& path) {
    version = which;
    EXPECT_EQ(load_as(path, flat, 2), all(2, kFine));
  }
  std::vector<int> save_named(const std::vector<std::string>& names) {
    return on_ranks(2, [&](Group& group) {
      auto held = hold(rows, group.rank(), 2, true);
      std::vector<SaveFile> files;
      for (const std::string& name : names) files.push_back({name, views_of(held)});
      save(group, files, folder_ / "model");
    });
  }
  void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
  std::set<std::string> in(const fs::path& directory) const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(directory)) found.insert(entry.path().filename().string());
    return found;
  }
};

}  // namespace shardow
