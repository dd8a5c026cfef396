// For tests of power cuts: the system calls of a save are recorded, and replayed to a disk that forgets what was not
// flushed. `versions`: the ways to save one version of a checkpoint over another, and which version a reader finds.
//
// The disk: a write is kept, lost or torn into sectors until its file is flushed by the machine that wrote it; a change
// of names is kept or lost, each by itself, until its directory is flushed; a rename is one change. That is the least
// that file systems promise.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/files.h"
#include "file/checkpoint_fixture.h"
#include "file/index.h"
#include "file/names.h"

namespace shardow::testing_disk {

namespace fs = std::filesystem;

struct Call {
  enum class Kind { kNames, kWrite, kSize, kFlush } kind;
  struct Name {
    int directory;
    std::string name;
    int node;  ///< -1: nothing is there any more
  };
  std::vector<Name> names = {};
  int node = -1;
  int64_t at = 0;  ///< of a write; or the size
  std::string data = {};
  int machine = 0;
};

inline thread_local int machine = 0;            ///< whose calls these are
inline std::atomic<bool> random_writes = true;  ///< false: every Recorder's storage takes files only from front to end

struct Node {
  bool directory = false;
  std::string bytes = {};
  std::map<std::string, int> entries = {};
};

using Nodes = std::map<int, Node>;  ///< 0 is the folder

struct Recording {
  Nodes before;
  std::vector<Call> calls;
  std::map<int, std::string> paths;  ///< where a node was made
};

/// Passes calls on to the kernel and writes down those that change a folder.
class Recorder : public base::Syscalls {
 public:
  explicit Recorder(const fs::path& folder) : folder_(folder) { start(folder); }

  Recording recording;

  int open(const char* path, int flags, mode_t mode) override {
    const std::lock_guard lock(mutex_);
    const bool is_new = (flags & O_CREAT) != 0 && !fs::exists(fs::symlink_status(path));
    const int fd = Syscalls::open(path, flags, mode);
    if (fd < 0 || !inside(path)) return fd;
    if (is_new) set_names({{parent(path), name(path), make(path)}});
    if (node_at(path) < 0) take_in(path);
    files_[fd] = node_at(path);
    if (!is_new && (flags & O_TRUNC) != 0)
      recording.calls.push_back({.kind = Call::Kind::kSize, .node = files_[fd], .machine = machine});
    return fd;
  }
  int close(int fd) override {
    const std::lock_guard lock(mutex_);
    files_.erase(fd);
    return Syscalls::close(fd);
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    const std::lock_guard lock(mutex_);
    const ssize_t done = Syscalls::pwrite(fd, data, bytes, offset);
    if (done > 0 && files_.contains(fd))
      recording.calls.push_back({Call::Kind::kWrite,
                                 {},
                                 files_[fd],
                                 offset,
                                 {static_cast<const char*>(data), static_cast<size_t>(done)},
                                 machine});
    return done;
  }
  int ftruncate(int fd, off_t length) override {
    if (!random_writes) return (errno = EOPNOTSUPP, -1);
    const std::lock_guard lock(mutex_);
    const int result = Syscalls::ftruncate(fd, length);
    if (result == 0 && files_.contains(fd))
      recording.calls.push_back({Call::Kind::kSize, {}, files_[fd], length, {}, machine});
    return result;
  }
  int fsync(int fd) override {
    const std::lock_guard lock(mutex_);
    if (files_.contains(fd))
      recording.calls.push_back({.kind = Call::Kind::kFlush, .node = files_[fd], .machine = machine});
    return Syscalls::fsync(fd);
  }
  int rename(const char* from, const char* to) override {
    const std::lock_guard lock(mutex_);
    const int node = fs::exists(fs::symlink_status(from)) ? node_at(from) : -1;
    const int result = Syscalls::rename(from, to);
    if (result == 0) set_names({{parent(from), name(from), -1}, {parent(to), name(to), node}});
    return result;
  }
  int mkdir(const char* path, mode_t mode) override {
    const std::lock_guard lock(mutex_);
    const int result = Syscalls::mkdir(path, mode);
    if (result == 0) set_names({{parent(path), name(path), make(path)}});
    return result;
  }
  int link(const char* from, const char* to) override {
    const std::lock_guard lock(mutex_);
    const int result = Syscalls::link(from, to);
    if (result == 0) set_names({{parent(to), name(to), node_at(from)}});
    return result;
  }
  int unlink(const char* path) override {
    const std::lock_guard lock(mutex_);
    const int result = Syscalls::unlink(path);
    if (result == 0) set_names({{parent(path), name(path), -1}});
    return result;
  }
  int rmdir(const char* path) override {
    const std::lock_guard lock(mutex_);
    const int result = Syscalls::rmdir(path);
    if (result == 0) set_names({{parent(path), name(path), -1}});
    return result;
  }

 protected:
  /// `copy` is another descriptor of the file that `fd` is of.
  void take_for(int copy, int fd) {
    const std::lock_guard lock(mutex_);
    if (files_.contains(fd)) files_[copy] = files_[fd];
  }

 private:
  static fs::path plain(const fs::path& path) {
    return path.has_filename() ? path : path.parent_path();
  }  // "dir/" is "dir"
  static std::string name(const fs::path& path) { return plain(path).filename().string(); }
  bool inside(const fs::path& path) const { return path.string().starts_with(folder_.string()); }
  int parent(const fs::path& path) { return node_at(plain(path).parent_path()); }
  static ino_t real(const fs::path& path) {
    struct stat found {};
    ::lstat(path.c_str(), &found);
    return found.st_ino;
  }
  int node_at(const fs::path& path) {  ///< -1: nothing is there
    const auto found = nodes_.find(real(path));
    return found == nodes_.end() ? -1 : found->second;
  }
  int make(const fs::path& path) {
    recording.paths[next_] = path.string();
    return nodes_[real(path)] = next_++;
  }
  void set_names(std::vector<Call::Name> names) {
    recording.calls.push_back({.kind = Call::Kind::kNames, .names = std::move(names)});
  }

  /// A file that was made past us: copied by the standard library.
  void take_in(const fs::path& path) {
    set_names({{parent(path), name(path), make(path)}});
    std::ifstream file(path, std::ios::binary);
    recording.calls.push_back(
        {Call::Kind::kWrite, {}, node_at(path), 0, {std::istreambuf_iterator<char>(file), {}}, machine});
  }

  int start(const fs::path& path) {
    const int node = make(path);
    recording.before[node].directory = fs::is_directory(path);
    if (!recording.before[node].directory) {
      std::ifstream file(path, std::ios::binary);
      recording.before[node].bytes = {std::istreambuf_iterator<char>(file), {}};
      return node;
    }
    for (const auto& entry : fs::directory_iterator(path))
      recording.before[node].entries[name(entry.path())] = start(entry.path());
    return node;
  }

  fs::path folder_;
  std::mutex mutex_;
  std::map<ino_t, int> nodes_;
  std::map<int, int> files_;  ///< by descriptor
  int next_ = 0;
};

enum class Fate { kKept, kLost, kAny };

/// What a disk has after the first `count` calls and a power cut; `fate` is that of what was not flushed.
inline Nodes after_power_cut(const Nodes& before, const std::vector<Call>& calls, size_t count, Fate fate,
                             std::mt19937& random) {
  std::vector<bool> safe(count, false);
  for (size_t flush = 0; flush < count; ++flush) {
    if (calls[flush].kind != Call::Kind::kFlush) continue;
    for (size_t i = 0; i < flush; ++i) {
      const Call& call = calls[i];
      const bool named = std::any_of(call.names.begin(), call.names.end(),
                                     [&](const auto& one) { return one.directory == calls[flush].node; });
      if (named || (call.names.empty() && call.node == calls[flush].node && call.machine == calls[flush].machine))
        safe[i] = true;
    }
  }
  constexpr size_t kSector = 512;
  const auto chance = [&](unsigned of = 2) { return random() % of == 0; };
  Nodes nodes = before;
  for (size_t i = 0; i < count; ++i) {
    const Call& call = calls[i];
    const bool torn = !safe[i] && fate == Fate::kAny && call.data.size() > kSector && chance();
    if (!safe[i] && !torn && (fate == Fate::kLost || (fate == Fate::kAny && chance(call.names.empty() ? 2 : 4))))
      continue;
    if (call.kind == Call::Kind::kNames) {
      for (const auto& [directory, name, node] : call.names) {
        nodes[directory].directory = true;
        if (node < 0) {
          nodes[directory].entries.erase(name);
        } else {
          nodes[directory].entries[name] = node;
        }
      }
    } else if (call.kind == Call::Kind::kSize) {
      nodes[call.node].bytes.resize(static_cast<size_t>(call.at));
    } else if (call.kind == Call::Kind::kWrite) {
      std::string& bytes = nodes[call.node].bytes;
      const size_t at = static_cast<size_t>(call.at);
      bytes.resize(std::max(bytes.size(), at + call.data.size()));
      for (size_t begin = 0; begin < call.data.size(); begin += kSector) {
        if (!torn || chance())
          bytes.replace(at + begin, std::min(kSector, call.data.size() - begin), call.data, begin, kSector);
      }
    }
  }
  return nodes;
}

/// Puts it into a folder, for readers.
inline void restore(const Nodes& nodes, int node, const fs::path& path, bool directory) {
  const auto found = nodes.find(node);
  if (!directory) {
    std::ofstream file(path, std::ios::binary);
    if (found != nodes.end())
      file.write(found->second.bytes.data(), static_cast<std::streamsize>(found->second.bytes.size()));
    return;
  }
  fs::create_directory(path);
  if (found == nodes.end()) return;
  for (const bool lists : {false, true}) {  // which are younger than what they have replaced
    for (const auto& [name, one] : found->second.entries) {
      const auto in = nodes.find(one);
      if (name.ends_with(".json") == lists) restore(nodes, one, path / name, in != nodes.end() && in->second.directory);
    }
  }
}

}  // namespace shardow::testing_disk

namespace shardow::versions {

inline const char* const kText = "checkpoint.json";  // appears with a directory
inline const std::vector<Spec> kSmall = {
    {"a", DType::kF32, {40, 900}}, {"b", DType::kBF16, {30, 11}}, {"c", DType::kF64, {5}}};

struct Way {
  const char* name;
  bool directory, first = false;
  SaveOptions options = {};
  std::vector<std::string> names = {};  ///< of files with names of their own
  bool random_writes = true;
};

inline std::vector<Way> ways() {
  const SaveOptions shards{.max_shard_size = 1000};
  const std::vector<std::string> names = {"ema-0.9.safetensors", "ema-0.99.safetensors"};
  return {{"a file", false},
          {"a file where there was none", false, true},
          {"a file from front to end", false, false, {}, {}, false},
          {"a directory", true, false, shards},
          {"a directory where there was none", true, true, shards},
          {"a directory of one file", true},
          {"a directory from front to end", true, false, shards, {}, false},
          {"several files", true, false, {}, names},
          {"several files where there were none", true, true, {}, names}};
}

inline std::string text_of(int which) {
  return fmt::format(R"({{"version": {}}})", which);
}

inline fs::path target(const Way& way) {
  return way.directory ? "model" : "model.safetensors";
}

/// Of the global `version`.
inline std::vector<Held> values(const std::vector<Spec>& specs, const Sharding& sharding, int rank, int ranks) {
  return hold(sharding, rank, ranks, true, specs);
}

/// Collective. The storage is as the way has it for every Recorder.
inline void save_version(Group& group, std::vector<Held>& held, int which, const Way& way, const fs::path& folder) {
  std::vector<SaveFile> files;
  for (const std::string& name : way.names) files.push_back({name, views_of(held)});
  if (files.empty()) files.push_back({"", views_of(held)});
  SaveOptions options = way.options;
  testing_disk::random_writes = way.random_writes;
  if (way.directory) options.texts[kText] = text_of(which);
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
  if (found <= 0 || !way.directory) return found;
  const std::string text = bytes_of(path / kText);
  return text == text_of(found) || text == text_of(found + 1) ? found : -1;  // it comes an instant before
}

/// What lies in a directory that no index or list names, and that is not one of these or of others'.
inline std::string strays(const fs::path& directory, const std::set<std::string>& others) {
  std::set<std::string> known = others;
  bool indexed = false;
  for (const char* list : {file::kIndexName, file::kAveragesName}) {
    const auto listing = file::listing_in(directory, list);
    if (!listing) continue;
    indexed = indexed || list == file::kIndexName;
    known.insert(list);
    for (const auto& [name, called] : listing->files) known.insert(called);
  }
  if (!indexed) known.insert(file::kSingleName);
  std::string found;
  if (!fs::is_directory(directory)) return found;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (const std::string name = entry.path().filename().string(); !known.contains(name)) found += " " + name;
  }
  return found;
}

}  // namespace shardow::versions
