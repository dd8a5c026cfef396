// Readers at each instant of a save, and the steps that it takes.
#include <fmt/format.h>
#include <simdjson.h>

#include "file/disk_model.h"
#include "file/index.h"
#include "file/saving_fixture.h"
#include "file/staging.h"

namespace shardow {
namespace {

/// Calls `before_each` before each call that changes something, on the machine's own calls.
class Instants : public base::Syscalls {
 public:
  explicit Instants(std::function<void()> before_each) : before_each_(std::move(before_each)) {}
  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) != 0) look();
    return Syscalls::open(path, flags, mode);
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) override {
    return look(), Syscalls::pwrite(fd, data, bytes, at);
  }
  int rename(const char* from, const char* to) override { return look(), Syscalls::rename(from, to); }
  int link(const char* from, const char* to) override { return look(), Syscalls::link(from, to); }
  int unlink(const char* path) override { return look(), Syscalls::unlink(path); }

 private:
  void look() {
    base::Syscalls own;
    const base::CallsTo scope(&own);
    const int saved = version;
    before_each_();
    version = saved;
  }
  std::function<void()> before_each_;
};

class Reading : public Saving {
 protected:
  void save_small(int which, int64_t limit) {
    version = which;
    auto held = versions::values(versions::kSmall, whole, 0, 1);
    const base::CallsTo here(machine_);
    save(*solo(), views_of(held), folder_ / "model", {.max_shard_size = limit});
  }

  int by_index() const { return versions::version_at(folder_ / "model"); }

  /// As transformers does.
  int file_first() const {
    const auto path = folder_ / "model", file = path / "model.safetensors";
    return versions::version_at(fs::exists(file) ? file : path);
  }

  /// The versions of all *.safetensors there; 0 for one that is not whole.
  std::set<int> by_pattern() const {
    std::set<int> found;
    for (const auto& entry : fs::directory_iterator(folder_ / "model")) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with('.') || entry.path().extension() != ".safetensors") continue;
      const Checkpoint file = Checkpoint::open(entry.path());
      for (const int which : {0, 1, 2}) {
        version = which;
        bool same = which > 0;
        for (const Held& expected : versions::values(versions::kSmall, whole, 0, 1)) {
          if (!file.contains(expected.view.name)) continue;
          Held read(expected.view.name, expected.view.dtype, expected.view.region);
          file.read(read.view);
          same = same && read.memory == expected.memory;
        }
        if (same) found.insert(which);
      }
    }
    return found;
  }
};

TEST_F(Reading, AtEveryInstantFindsOneWholeVersionByTheIndexAndByTheFileAlike) {
  for (const auto& [before, after] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {0, 1000}, {1000, 0}, {1000, 1000}, {1000, 80'000}}) {
    SCOPED_TRACE(fmt::format("{} to {}", before, after));
    fs::remove_all(folder_ / "model");
    save_small(1, before);
    std::vector<int> index, file;
    Instants machine([&] {
      index.push_back(by_index());
      file.push_back(file_first());
    });
    machine_ = &machine;
    save_small(2, after);
    machine_ = nullptr;
    for (auto* const seen : {&index, &file}) {
      EXPECT_TRUE(std::is_sorted(seen->begin(), seen->end())) << fmt::format("{}", fmt::join(*seen, " "));
      EXPECT_GE(seen->front(), 1);
      EXPECT_LE(seen->back(), 2);
    }
    EXPECT_EQ(by_index(), 2);
    EXPECT_EQ(file_first(), 2);
  }
}

/// docs/durability.md says so: whoever takes every file of a directory may take those of two versions.
TEST_F(Reading, ByPatternMayMeetBothVersionsWhereSeveralFilesAreReplaced) {
  save_small(1, 1000);
  std::set<std::set<int>> seen;
  Instants machine([&] { seen.insert(by_pattern()); });
  machine_ = &machine;
  save_small(2, 1000);
  machine_ = nullptr;
  seen.insert(by_pattern());
  EXPECT_EQ(seen, (std::set<std::set<int>>{{1}, {1, 2}, {2}}));
}

/// A save that commits while a directory is read, twice, so that names come again.
TEST_F(Reading, ReadsTheIndexAgainWhereAFileIsGone) {
  save_small(1, 1000);
  class Saver : public base::Syscalls {
   public:
    std::function<void()> save;
    int openat(int directory, const char* name, int flags, mode_t mode) override {
      const bool now = std::string_view(name).ends_with(".safetensors") && left_-- == 0;
      if (now) {
        base::Syscalls own;
        const base::CallsTo scope(&own);
        save();
      }
      return Syscalls::openat(directory, name, flags, mode);
    }

   private:
    int left_ = 1;
  } machine;
  machine.save = [&] { save_small(2, 1000), save_small(3, 1000); };
  const base::CallsTo scope(&machine);
  EXPECT_EQ(by_index(), 3);
}

/// Writes down what changes names, and flushes. A nonce is N, safetensors are st.
class Steps : public base::Syscalls {
 public:
  explicit Steps(fs::path folder) : folder_(std::move(folder)) {}
  std::vector<std::string> steps;
  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) != 0) add("make", path);
    return Syscalls::open(path, flags, mode);
  }
  int fsync(int fd) override {
    return add("flush", fs::read_symlink("/proc/self/fd/" + std::to_string(fd))), Syscalls::fsync(fd);
  }
  int mkdir(const char* path, mode_t mode) override { return add("mkdir", path), Syscalls::mkdir(path, mode); }
  int rename(const char* from, const char* to) override { return add("rename", from, to), Syscalls::rename(from, to); }
  int link(const char* from, const char* to) override { return add("link", from, to), Syscalls::link(from, to); }
  int unlink(const char* path) override { return add("remove", path), Syscalls::unlink(path); }

 private:
  std::string plain(const fs::path& path) const {
    std::string text = path.lexically_relative(folder_).string();
    for (size_t at = 0; at + 16 <= text.size(); ++at)
      if (text.find_first_not_of("0123456789abcdef", at) >= at + 16) text.replace(at, 16, "N");
    const std::string_view long_name = "safetensors";
    for (size_t at = text.find(long_name); at != std::string::npos; at = text.find(long_name))
      text.replace(at, long_name.size(), "st");
    return text;
  }
  void add(const char* what, const fs::path& from, const fs::path& to = {}) {
    steps.push_back(fmt::format("{} {}{}", what, plain(from), to.empty() ? "" : " > " + plain(to)));
  }
  const fs::path folder_;
};

/// One rank's, of version `which`; of each file the data, the header and its length are flushed.
struct Kind {
  const char* name;
  int which;
  int64_t limit;
  const char* steps;
};

const Kind kKinds[] = {
    {"new", 1, 50'000, R"(
make .model.lock.tmp
mkdir .model.N.tmp
make .model.N.tmp/model-00001-of-00003.st
make .model.N.tmp/model-00002-of-00003.st
make .model.N.tmp/model-00003-of-00003.st
rename .model.N.tmp > .model.N.tmp
rename .model.N.tmp > .model.N.tmp
flush .model.N.tmp/model-00001-of-00003.st
flush .model.N.tmp/model-00002-of-00003.st
flush .model.N.tmp/model-00003-of-00003.st
flush .model.N.tmp/model-00001-of-00003.st
flush .model.N.tmp/model-00001-of-00003.st
flush .model.N.tmp/model-00002-of-00003.st
flush .model.N.tmp/model-00002-of-00003.st
flush .model.N.tmp/model-00003-of-00003.st
flush .model.N.tmp/model-00003-of-00003.st
make .model.N.tmp/model.st.index.json
flush .model.N.tmp/model.st.index.json
flush .model.N.tmp
rename .model.N.tmp > model
flush .
remove .model.lock.tmp
)"},
    {"several to several", 2, 50'000, R"(
make .model.lock.tmp
make model/.model-00001-of-00003.st.N.tmp
make model/.model-00002-of-00003.st.N.tmp
make model/.model-00003-of-00003.st.N.tmp
rename model/.model-00001-of-00003.st.N.tmp > model/.model-00001-of-00003.st.N.tmp
rename model/.model-00001-of-00003.st.N.tmp > model/.model-00001-of-00003.st.N.tmp
flush model/.model-00001-of-00003.st.N.tmp
flush model/.model-00002-of-00003.st.N.tmp
flush model/.model-00003-of-00003.st.N.tmp
flush model/.model-00001-of-00003.st.N.tmp
flush model/.model-00001-of-00003.st.N.tmp
flush model/.model-00002-of-00003.st.N.tmp
flush model/.model-00002-of-00003.st.N.tmp
flush model/.model-00003-of-00003.st.N.tmp
flush model/.model-00003-of-00003.st.N.tmp
flush .
rename model/.model-00001-of-00003.st.N.tmp > model/model-N-00001-of-00003.st
rename model/.model-00002-of-00003.st.N.tmp > model/model-N-00002-of-00003.st
rename model/.model-00003-of-00003.st.N.tmp > model/model-N-00003-of-00003.st
make model/.model.st.index.json.N.tmp
flush model/.model.st.index.json.N.tmp
flush model
rename model/.model.st.index.json.N.tmp > model/model.st.index.json
flush model
remove model/model-00001-of-00003.st
remove model/model-00002-of-00003.st
remove model/model-00003-of-00003.st
remove .model.lock.tmp
)"},
    {"several to one", 1, 0, R"(
make .model.lock.tmp
make model/.model.st.N.tmp
rename model/.model.st.N.tmp > model/.model.st.N.tmp
rename model/.model.st.N.tmp > model/.model.st.N.tmp
flush model/.model.st.N.tmp
flush model/.model.st.N.tmp
flush model/.model.st.N.tmp
flush .
rename model/.model.st.N.tmp > model/model.st
make model/.model.st.index.json.N.tmp
flush model/.model.st.index.json.N.tmp
flush model
rename model/.model.st.index.json.N.tmp > model/model.st.index.json
flush model
remove model/model-N-00001-of-00003.st
remove model/model-N-00002-of-00003.st
remove model/model-N-00003-of-00003.st
remove model/model.st.index.json
remove .model.lock.tmp
)"},
    {"one to one", 2, 0, R"(
make .model.lock.tmp
make model/.model.st.N.tmp
rename model/.model.st.N.tmp > model/.model.st.N.tmp
rename model/.model.st.N.tmp > model/.model.st.N.tmp
flush model/.model.st.N.tmp
flush model/.model.st.N.tmp
flush model/.model.st.N.tmp
flush .
rename model/.model.st.N.tmp > model/model.st
flush model
remove .model.lock.tmp
)"},
    {"one to several", 1, 50'000, R"(
make .model.lock.tmp
make model/.model-00001-of-00003.st.N.tmp
make model/.model-00002-of-00003.st.N.tmp
make model/.model-00003-of-00003.st.N.tmp
rename model/.model-00001-of-00003.st.N.tmp > model/.model-00001-of-00003.st.N.tmp
rename model/.model-00001-of-00003.st.N.tmp > model/.model-00001-of-00003.st.N.tmp
flush model/.model-00001-of-00003.st.N.tmp
flush model/.model-00002-of-00003.st.N.tmp
flush model/.model-00003-of-00003.st.N.tmp
flush model/.model-00001-of-00003.st.N.tmp
flush model/.model-00001-of-00003.st.N.tmp
flush model/.model-00002-of-00003.st.N.tmp
flush model/.model-00002-of-00003.st.N.tmp
flush model/.model-00003-of-00003.st.N.tmp
flush model/.model-00003-of-00003.st.N.tmp
flush .
link model/.model-00001-of-00003.st.N.tmp > model/model-00001-of-00003.st
link model/.model-00002-of-00003.st.N.tmp > model/model-00002-of-00003.st
link model/.model-00003-of-00003.st.N.tmp > model/model-00003-of-00003.st
make model/.model.st.index.json.N.tmp
flush model/.model.st.index.json.N.tmp
flush model
rename model/.model.st.index.json.N.tmp > model/model.st.index.json
flush model
remove model/model.st
remove model/.model-00001-of-00003.st.N.tmp
remove model/.model-00002-of-00003.st.N.tmp
remove model/.model-00003-of-00003.st.N.tmp
remove .model.lock.tmp
)"},
};

TEST_F(Reading, TakesTheseStepsInThisOrder) {
  folder_ = fs::canonical(folder_);
  for (const Kind& kind : kKinds) {
    Steps machine(folder_);
    machine_ = &machine;
    save_small(kind.which, kind.limit);
    machine_ = nullptr;
    EXPECT_EQ(fmt::format("\n{}\n", fmt::join(machine.steps, "\n")), kind.steps) << kind.name;
  }
}

}  // namespace
}  // namespace shardow
