// What save() and load() promise, with ranks as threads: any sharding to any other, the same bytes whoever saved them, nothing published
// where anything failed.
#include "shardow/checkpoint.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "base/files.h"
#include "file/device.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace shardow {
namespace {

namespace fs = std::filesystem;

#ifdef __SANITIZE_THREAD__
constexpr bool kSlow = true;  // fewer rounds of the same
#else
constexpr bool kSlow = false;
#endif

/// One tensor as one rank has it.
struct Held {
  std::vector<std::byte> memory;
  TensorView view;

  Held(const std::string& name, DType dtype, const Region& region)
      : memory(static_cast<size_t>(region.size() * dtype_bits(dtype) / 8)), view{name, dtype, region, nullptr} {
    view.data = memory.data();
  }
};

struct Spec {
  std::string name;
  DType dtype;
  Shape shape;
};

const std::vector<Spec> kSpecs = {{"blocks.0.weight", DType::kF32, {37, 11}},
                                  {"blocks.0.bias", DType::kF32, {37}},
                                  {"half", DType::kBF16, {8, 5, 3}},
                                  {"scalar", DType::kF64, {}},
                                  {"none", DType::kF32, {0, 4}},
                                  {"counts", DType::kI64, {13}},
                                  {"flags", DType::kBool, {7}},
                                  {"tiny", DType::kF8E4M3, {5, 3}},
                                  {"large", DType::kF32, {700, 1000}},
                                  {"one row", DType::kF32, {1, 9}}};

/// How `ranks` ranks share a tensor.
using Sharding = std::function<Region(const Shape&, int rank, int ranks)>;

Region rows(const Shape& shape, int rank, int ranks) {
  if (shape.empty() || shape[0] == 0) return Region::whole(shape);
  std::vector<std::vector<Interval>> dims;
  for (const int64_t size : shape) dims.push_back({{0, size}});
  const int64_t each = (shape[0] + ranks - 1) / ranks, begin = std::min(each * rank, shape[0]), end = std::min(begin + each, shape[0]);
  dims[0] = begin < end ? std::vector<Interval>{{begin, end}} : std::vector<Interval>{};
  return Region::grid(shape, dims);
}
Region columns(const Shape& shape, int rank, int ranks) {
  if (shape.size() < 2) return rows(shape, rank, ranks);
  std::vector<std::vector<Interval>> dims;
  for (const int64_t size : shape) dims.push_back({{0, size}});
  const int64_t each = (shape[1] + ranks - 1) / ranks, begin = std::min(each * rank, shape[1]), end = std::min(begin + each, shape[1]);
  dims[1] = begin < end ? std::vector<Interval>{{begin, end}} : std::vector<Interval>{};
  return Region::grid(shape, dims);
}
Region flat(const Shape& shape, int rank, int ranks) {
  return Region::whole(shape).part(rank, ranks, 1);
}
Region whole(const Shape& shape, int, int) {
  return Region::whole(shape);
}

int version = 0;  ///< of all values

/// The byte at this place of the global tensor.
std::byte value(const Spec& spec, int64_t byte) {
  if (spec.dtype == DType::kBool) return static_cast<std::byte>(byte % 2);
  return static_cast<std::byte>((byte * 31 + static_cast<int64_t>(spec.name.size()) * 7 + byte / 251 + version) % 127);
}

std::vector<Held> hold(const Sharding& sharding, int rank, int ranks, bool filled) {
  std::vector<Held> held;
  for (const Spec& spec : kSpecs) {
    Held& one = held.emplace_back(spec.name, spec.dtype, sharding(spec.shape, rank, ranks));
    const int64_t size = dtype_bits(spec.dtype) / 8;
    if (!filled) continue;
    one.view.region.for_each_run([&](const Run& run) {
      for (int64_t i = 0; i < run.length * size; ++i)
        one.memory[static_cast<size_t>(run.local_begin * size + i)] = value(spec, run.global_begin * size + i);
    });
  }
  return held;
}

std::vector<TensorView> views_of(std::vector<Held>& held) {
  std::vector<TensorView> views;
  for (Held& one : held) {
    one.view.data = one.memory.data();
    views.push_back(one.view);
  }
  return views;
}

/// Runs fn(group) on `ranks` threads; the code with which each ended, kInternal + 1 for none.
constexpr int kFine = -1;
std::vector<int> on_ranks(int ranks, const std::function<void(Group&)>& fn) {
  auto groups = threads(ranks);
  std::vector<int> codes(static_cast<size_t>(ranks), kFine);
  std::vector<std::thread> running;
  for (int rank = 0; rank < ranks; ++rank) {
    running.emplace_back([&, rank] {
      try {
        fn(*groups[static_cast<size_t>(rank)]);
      } catch (const Error& error) {
        codes[static_cast<size_t>(rank)] = static_cast<int>(error.code());
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  return codes;
}

std::vector<int> all(int ranks, int code) {
  return std::vector<int>(static_cast<size_t>(ranks), code);
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Checkpoint : public testing::Test {
 protected:
  Checkpoint() : folder_(fs::path(testing::TempDir()) / ("checkpoint_test_" + std::to_string(::getpid()))) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~Checkpoint() override {
    base::replace_syscalls(nullptr);
    fs::remove_all(folder_);
  }

  std::vector<int> save_as(const fs::path& path, const Sharding& sharding, int ranks, const SaveOptions& options = {}) {
    return on_ranks(ranks, [&](Group& group) {
      auto held = hold(sharding, group.rank(), ranks, true);
      save(group, views_of(held), path, options);
    });
  }

  std::vector<int> load_as(const fs::path& path, const Sharding& sharding, int ranks, bool compare = true) {
    return on_ranks(ranks, [&](Group& group) {
      auto held = hold(sharding, group.rank(), ranks, false);
      load(group, views_of(held), path);
      if (!compare) return;
      auto expected = hold(sharding, group.rank(), ranks, true);
      for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
    });
  }

  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_)) found.insert(entry.path().filename().string());
    return found;
  }

  fs::path folder_;
};

const std::vector<std::pair<const char*, Sharding>> kShardings = {{"rows", rows}, {"columns", columns}, {"flat", flat}, {"whole", whole}};

TEST_F(Checkpoint, OfAnyShardingHasTheSameBytesAndLoadsIntoAnyOther) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  const std::string reference = bytes_of(folder_ / "reference.safetensors");
  for (const auto& [name, sharding] : kShardings) {
    for (const int ranks : kSlow ? std::vector<int>{3} : std::vector<int>{1, 2, 3, 5}) {
      SCOPED_TRACE(std::string(name) + " on " + std::to_string(ranks));
      ASSERT_EQ(save_as(folder_ / "other.safetensors", sharding, ranks), all(ranks, kFine));
      EXPECT_TRUE(bytes_of(folder_ / "other.safetensors") == reference);
      EXPECT_EQ(load_as(folder_ / "reference.safetensors", sharding, ranks), all(ranks, kFine));
    }
  }
  EXPECT_EQ(names(), (std::set<std::string>{"reference.safetensors", "other.safetensors"}));
}

TEST_F(Checkpoint, OfSeveralFilesIsADirectoryWithAnIndex) {
  const SaveOptions options{.max_shard_size = 1 << 20};
  for (int round = 0; round < 2; ++round) {  // the second one replaces the first
    ASSERT_EQ(save_as(folder_ / "model", rows, 3, options), all(3, kFine));
    EXPECT_TRUE(fs::exists(folder_ / "model" / "model.safetensors.index.json"));
    EXPECT_TRUE(fs::exists(folder_ / "model" / "model-00001-of-00003.safetensors"));
    EXPECT_EQ(names(), (std::set<std::string>{"model"}));
  }
  EXPECT_EQ(load_as(folder_ / "model", columns, 2), all(2, kFine));
}

TEST_F(Checkpoint, LeavesWhatElseIsInItsDirectory) {
  const SaveOptions options{.max_shard_size = 1 << 20};
  ASSERT_EQ(save_as(folder_ / "model", rows, 2, options), all(2, kFine));
  std::ofstream(folder_ / "model" / "config.json") << "{}";
  fs::create_directories(folder_ / "model" / "tokenizer");
  std::ofstream(folder_ / "model" / "tokenizer" / "words.txt") << "a b";
  ASSERT_EQ(save_as(folder_ / "model", rows, 2), all(2, kFine));  // one file now: the old ones and their index go
  EXPECT_EQ(bytes_of(folder_ / "model" / "config.json"), "{}");
  EXPECT_EQ(bytes_of(folder_ / "model" / "tokenizer" / "words.txt"), "a b");
  EXPECT_TRUE(fs::exists(folder_ / "model" / "model.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ / "model" / "model.safetensors.index.json"));
  EXPECT_FALSE(fs::exists(folder_ / "model" / "model-00001-of-00003.safetensors"));
}

TEST_F(Checkpoint, CastsOnTheWayOutAndIn) {
  auto groups = threads(1);
  Group& group = *groups[0];
  Held out("w", DType::kF32, Region::whole({3})), in("w", DType::kF64, Region::whole({3}));
  const float values[] = {1.5f, -2.0f, 3.25f};
  std::memcpy(out.memory.data(), values, sizeof values);
  save(group, std::span(&out.view, 1), folder_ / "a.safetensors", {.dtype = DType::kBF16});
  EXPECT_EQ(fs::file_size(folder_ / "a.safetensors"), 4096u + 6);
  load(group, std::span(&in.view, 1), folder_ / "a.safetensors");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(reinterpret_cast<double*>(in.memory.data())[i], values[i]);
}

TEST_F(Checkpoint, RefusesWhatDoesNotFitBeforeAnythingChanges) {
  const auto path = folder_ / "a.safetensors";
  ASSERT_EQ(save_as(path, rows, 2), all(2, kFine));
  const std::string before = bytes_of(path);
  const int invalid = static_cast<int>(Code::kInvalidArgument);
  const auto one = [&](int ranks, const std::function<Region(int)>& region, Shape) {
    return on_ranks(ranks, [&](Group& group) {
      Held held("w", DType::kF32, region(group.rank()));
      save(group, std::span(&held.view, 1), path);
    });
  };
  EXPECT_EQ(one(2, [](int) { return Region::whole({4}).window(0, 2); }, {}), all(2, invalid));        // a hole
  EXPECT_EQ(one(2, [](int r) { return Region::whole({4}).window(r, r + 3); }, {}), all(2, invalid));  // an overlap
  EXPECT_EQ(one(2, [](int r) { return Region::whole({4 + r}); }, {}), all(2, invalid));               // two shapes
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Held held("w", group.rank() == 0 ? DType::kF32 : DType::kF16, Region::whole({4}));
                       save(group, std::span(&held.view, 1), path);
                     }),
            all(2, invalid));
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Held held("w", DType::kF32, Region::whole({4}));
                       save(group, std::span(&held.view, 1), folder_ / (group.rank() == 0 ? "x.safetensors" : "y.safetensors"));
                     }),
            all(2, invalid));
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Held held("unknown", DType::kF32, Region::whole({4}));
                       load(group, std::span(&held.view, 1), path);
                     }),
            all(2, invalid));
  EXPECT_TRUE(bytes_of(path) == before);
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors"}));
}

TEST_F(Checkpoint, FindsEveryFlippedByteOfItsData) {
  const auto path = folder_ / "a.safetensors";
  ASSERT_EQ(save_as(path, rows, 2), all(2, kFine));
  const std::string good = bytes_of(path);
  std::mt19937 random(1);
  for (int round = 0; round < (kSlow ? 6 : 40); ++round) {
    std::string bad = good;
    const size_t data = good.size() - 2'803'000;
    bad[std::uniform_int_distribution<size_t>(round % 2 == 0 ? data : good.size() - 200, good.size() - 1)(random)] ^=
        static_cast<char>(1 << (round % 8));
    std::ofstream(path, std::ios::binary) << bad;
    EXPECT_EQ(load_as(path, round % 3 == 0 ? whole : rows, 2, false), all(2, static_cast<int>(Code::kCorrupt)));
  }
}

/// A disk that fails at its n-th call of one kind, or always does half of what it is asked.
class BadDisk : public base::Syscalls {
 public:
  enum class Call { kOpen, kWrite, kRead, kTruncate, kSync, kRename, kMkdir, kSpace, kClose };
  BadDisk(Call call, int after, int error) : call_(call), after_(after), error_(error) {}

  int open(const char* path, int flags, mode_t mode) override { return fails(Call::kOpen) ? -1 : Syscalls::open(path, flags, mode); }
  int close(int fd) override {
    const int result = Syscalls::close(fd);
    return fails(Call::kClose) ? -1 : result;
  }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return fails(Call::kRead) ? -1 : Syscalls::pread(fd, data, some(bytes), offset);
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return fails(Call::kWrite) ? -1 : Syscalls::pwrite(fd, data, some(bytes), offset);
  }
  int ftruncate(int fd, off_t length) override { return fails(Call::kTruncate) ? -1 : Syscalls::ftruncate(fd, length); }
  int fsync(int fd) override { return fails(Call::kSync) ? -1 : Syscalls::fsync(fd); }
  int rename(const char* from, const char* to) override { return fails(Call::kRename) ? -1 : Syscalls::rename(from, to); }
  int exchange(const char* a, const char* b) override { return fails(Call::kRename) ? -1 : Syscalls::exchange(a, b); }
  int mkdir(const char* path, mode_t mode) override { return fails(Call::kMkdir) ? -1 : Syscalls::mkdir(path, mode); }
  int statfs(const char* path, struct statfs* out) override { return fails(Call::kSpace) ? -1 : Syscalls::statfs(path, out); }

  bool failed() const { return failed_; }

 private:
  bool fails(Call call) {
    const std::lock_guard lock(mutex_);
    if (call != call_ || error_ == 0 || after_-- != 0) return false;
    failed_ = true;
    errno = error_;
    return true;
  }
  size_t some(size_t bytes) const { return error_ == 0 && bytes > 1 ? bytes / 2 : bytes; }

  std::mutex mutex_;
  Call call_;
  int after_, error_;
  bool failed_ = false;
};

TEST_F(Checkpoint, OfABadDiskIsTheOldOneWithOneErrorForAll) {
  using Call = BadDisk::Call;
  const auto path = folder_ / "model";
  const SaveOptions options{.max_shard_size = 1 << 20};
  ASSERT_EQ(save_as(path, flat, 3, options), all(3, kFine));
  const std::string before = bytes_of(path / "model-00001-of-00003.safetensors");
  ASSERT_FALSE(before.empty());
  for (const Call call :
       {Call::kOpen, Call::kWrite, Call::kTruncate, Call::kSync, Call::kRename, Call::kMkdir, Call::kSpace, Call::kClose}) {
    for (const int error : kSlow ? std::vector<int>{EIO} : std::vector<int>{EIO, ENOSPC, EDQUOT}) {
      for (int after = 0;; ++after) {
        SCOPED_TRACE(std::to_string(static_cast<int>(call)) + " fails with " + std::to_string(error) + " after " + std::to_string(after));
        BadDisk disk(call, after, error);
        base::replace_syscalls(&disk);
        const std::vector<int> codes = save_as(path, rows, 3, options);
        base::replace_syscalls(nullptr);
        if (!disk.failed()) break;  // every such call has failed once
        const std::set<int> different(codes.begin(), codes.end());
        EXPECT_EQ(different.size(), 1u);
        const int expected = static_cast<int>(error == EIO ? Code::kIo : Code::kOutOfSpace);
        EXPECT_TRUE(*different.begin() == expected || *different.begin() == kFine);  // closing a file that was only read may fail unheard
        EXPECT_EQ(names(), (std::set<std::string>{"model"}));
        EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
        EXPECT_TRUE(bytes_of(path / "model-00001-of-00003.safetensors") == before);
      }
    }
  }
}

/// What a mount of an object store does: files are written from front to end and appear when they are closed, if all their writes went
/// well; where `renames` is false nothing is renamed.
class ObjectStore : public base::Syscalls {
 public:
  explicit ObjectStore(bool renames, int fail_after = -1) : renames_(renames), left_(fail_after) {}

  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) == 0) return Syscalls::open(path, flags, mode);
    if (const int error = fs::exists(path) ? EEXIST : 0; error != 0 && (flags & O_EXCL) != 0) return refuse(error);
    const std::string part = testing::TempDir() + "part" + std::to_string(parts_++);
    const int fd = Syscalls::open(part.c_str(), flags, mode);
    const std::lock_guard lock(mutex_);
    if (fd >= 0) open_[fd] = {path, part};
    return fd;
  }
  int close(int fd) override {
    const std::lock_guard lock(mutex_);
    if (const auto found = open_.find(fd); found != open_.end()) {
      found->second.failed ? fs::remove(found->second.part) : (fs::rename(found->second.part, found->second.path), true);
      open_.erase(found);
    }
    return Syscalls::close(fd);
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    {
      const std::lock_guard lock(mutex_);
      Upload& upload = open_.at(fd);
      const int error = upload.written != offset ? EINVAL : left_-- == 0 ? EIO : 0;
      upload.failed = upload.failed || error != 0;
      if (error != 0) return refuse(error);
      upload.written += static_cast<off_t>(bytes);
    }
    return Syscalls::pwrite(fd, data, bytes, offset);
  }
  int ftruncate(int, off_t) override { return refuse(EOPNOTSUPP); }
  int rename(const char* from, const char* to) override { return renames_ ? Syscalls::rename(from, to) : refuse(ENOSYS); }
  int exchange(const char*, const char*) override { return refuse(ENOSYS); }

  bool failed() const { return left_ < 0; }

 private:
  struct Upload {
    fs::path path, part;
    off_t written = 0;
    bool failed = false;
  };
  static int refuse(int error) {
    errno = error;
    return -1;
  }
  bool renames_;
  std::mutex mutex_;
  std::map<int, Upload> open_;
  int left_;
  std::atomic<int> parts_{0};
};

TEST_F(Checkpoint, GoesToStorageThatTakesFilesOnlyFromFrontToEnd) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  const std::string reference = bytes_of(folder_ / "reference.safetensors");
  for (const bool renames : {true, false}) {
    for (const auto& [name, sharding] : kShardings) {
      SCOPED_TRACE(std::string(name) + (renames ? ", renaming" : ", not renaming"));
      ObjectStore store(renames);
      base::replace_syscalls(&store);
      for (int round = 0; round < 2; ++round) {
        EXPECT_EQ(save_as(folder_ / "one.safetensors", sharding, 3), all(3, kFine));
        EXPECT_EQ(save_as(folder_ / "model", sharding, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
        EXPECT_TRUE(bytes_of(folder_ / "one.safetensors") == reference);
        EXPECT_EQ(load_as(folder_ / "model", whole, 1), all(1, kFine));
        EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "model"), {}), 4);  // three files and the index
      }
      base::replace_syscalls(nullptr);
    }
  }
  EXPECT_EQ(names(), (std::set<std::string>{"reference.safetensors", "one.safetensors", "model"}));
}

TEST_F(Checkpoint, OfADirectoryThatCannotBeRenamedIsTheOldOneUntilItsIndexIsThere) {
  const auto path = folder_ / "model";
  const SaveOptions options{.max_shard_size = 1 << 20};
  for (int after = 0;; ++after) {
    fs::remove_all(path);
    version = 1;
    ASSERT_EQ(save_as(path, rows, 3, options), all(3, kFine));
    ObjectStore store(false, after);
    base::replace_syscalls(&store);
    version = 2;
    const std::vector<int> codes = save_as(path, columns, 3, options);
    base::replace_syscalls(nullptr);
    if (!store.failed()) break;
    EXPECT_EQ(codes, all(3, static_cast<int>(Code::kIo))) << after;
    version = 1;
    EXPECT_EQ(load_as(path, whole, 1), all(1, kFine)) << after;
    ObjectStore healthy(false);
    base::replace_syscalls(&healthy);
    EXPECT_EQ(save_as(path, rows, 3, options), all(3, kFine));  // clears away what the failed one left
    base::replace_syscalls(nullptr);
    EXPECT_EQ(std::distance(fs::directory_iterator(path), {}), 4);
  }
  version = 2;
  EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
  version = 0;
}

TEST_F(Checkpoint, IsWrittenInSequenceWhereThatIsAskedFor) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  ASSERT_EQ(save_as(folder_ / "other.safetensors", columns, 3, {.sequential = true}), all(3, kFine));
  EXPECT_TRUE(bytes_of(folder_ / "other.safetensors") == bytes_of(folder_ / "reference.safetensors"));
}

/// A machine that does what its name says.
class NoExchange : public base::Syscalls {
 public:
  int exchange(const char*, const char*) override { return (errno = EINVAL, -1); }
};
class Interrupted : public base::Syscalls {
 public:
  int open(const char* p, int flags, mode_t mode) override { return now() ? -1 : Syscalls::open(p, flags, mode); }
  ssize_t pread(int fd, void* data, size_t bytes, off_t at) override { return now() ? -1 : Syscalls::pread(fd, data, bytes, at); }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) override { return now() ? -1 : Syscalls::pwrite(fd, data, bytes, at); }
  int ftruncate(int fd, off_t length) override { return now() ? -1 : Syscalls::ftruncate(fd, length); }
  int fsync(int fd) override { return now() ? -1 : Syscalls::fsync(fd); }

 private:
  bool now() {
    errno = EINTR;
    return calls_++ % 2 == 0;
  }
  std::atomic<int> calls_{0};
};
class ReadOnly : public base::Syscalls {
 public:
  int open(const char* p, int flags, mode_t mode) override {
    return flags & O_CREAT ? (errno = EROFS, -1) : Syscalls::open(p, flags, mode);
  }
  int mkdir(const char*, mode_t) override { return (errno = EROFS, -1); }
};
class Shrinking : public base::Syscalls {
 public:
  explicit Shrinking(fs::path path) : path_(std::move(path)) {}
  ssize_t pread(int fd, void* data, size_t bytes, off_t at) override {
    if (reads_++ == 4) fs::resize_file(path_, 5000);
    return Syscalls::pread(fd, data, bytes, at);
  }

 private:
  fs::path path_;
  std::atomic<int> reads_{0};
};

/// Ranks in containers of their own.
class Apart : public base::Syscalls {
 public:
  explicit Apart(bool can_make) : can_make_(can_make) {}
  int memfd_create(const char* name, unsigned flags) override {
    return can_make_ ? Syscalls::memfd_create(name, flags) : (errno = ENOSYS, -1);
  }
  int open(const char* path, int flags, mode_t mode) override {
    return std::string(path).starts_with("/proc/") ? (errno = ENOENT, -1) : Syscalls::open(path, flags, mode);
  }

 private:
  bool can_make_;
};

TEST_F(Checkpoint, OfRanksThatShareNoMemoryHasTheSameBytes) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  for (const bool can_make : {true, false}) {
    Apart machine(can_make);
    base::replace_syscalls(&machine);
    ASSERT_EQ(save_as(folder_ / "a.safetensors", columns, 5), all(5, kFine));
    base::replace_syscalls(nullptr);
    EXPECT_TRUE(bytes_of(folder_ / "a.safetensors") == bytes_of(folder_ / "reference.safetensors"));
  }
}

TEST_F(Checkpoint, ReplacesADirectoryWhereTwoCannotBeExchanged) {
  NoExchange machine;
  base::replace_syscalls(&machine);
  for (version = 1; version < 4; ++version) {
    ASSERT_EQ(save_as(folder_ / "model", rows, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
    EXPECT_EQ(load_as(folder_ / "model", whole, 2), all(2, kFine));
  }
  version = 0;
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

TEST_F(Checkpoint, GoesOnAfterInterruptions) {
  Interrupted machine;
  base::replace_syscalls(&machine);
  EXPECT_EQ(save_as(folder_ / "a.safetensors", columns, 3), all(3, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
}

TEST_F(Checkpoint, OfAReadOnlyDirectoryIsOneErrorForAll) {
  ReadOnly machine;
  base::replace_syscalls(&machine);
  EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 3), all(3, static_cast<int>(Code::kIo)));
  EXPECT_EQ(save_as(folder_ / "a", rows, 3), all(3, static_cast<int>(Code::kIo)));
  EXPECT_TRUE(names().empty());
}

TEST_F(Checkpoint, OfAFileThatShrinksWhileItIsReadIsOneErrorForAll) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  Shrinking machine(folder_ / "a.safetensors");
  base::replace_syscalls(&machine);
  EXPECT_EQ(load_as(folder_ / "a.safetensors", columns, 2, false), all(2, static_cast<int>(Code::kCorrupt)));
}

TEST_F(Checkpoint, OfSeveralNamedFilesAppearsWhole) {
  const auto save_both = [&](int ranks) {
    return on_ranks(ranks, [&](Group& group) {
      auto first = hold(rows, group.rank(), ranks, true), second = hold(columns, group.rank(), ranks, true);
      const std::vector<SaveFile> files = {{"a.safetensors", views_of(first), {{"which", "a"}}}, {"b.safetensors", views_of(second)}};
      save(group, files, folder_ / "both");
    });
  };
  for (int round = 0; round < 2; ++round) EXPECT_EQ(save_both(3), all(3, kFine));
  EXPECT_EQ(load_as(folder_ / "both" / "a.safetensors", flat, 2), all(2, kFine));
  EXPECT_EQ(load_as(folder_ / "both" / "b.safetensors", flat, 2), all(2, kFine));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "both"), {}), 2);
  EXPECT_EQ(on_ranks(1,
                     [&](Group& group) {
                       const std::vector<SaveFile> files = {{"../a.safetensors", {}}, {"b.safetensors", {}}};
                       save(group, files, folder_ / "both");
                     }),
            all(1, static_cast<int>(Code::kInvalidArgument)));
}

TEST_F(Checkpoint, ThatWasStagedHasTheValuesOfThatMoment) {
  for (const auto& dtype : {std::optional<DType>(), std::optional(DType::kBF16)}) {
    SaveOptions options;
    options.dtype = dtype;
    const auto save_staged = [&](const fs::path& path, bool staged) {
      return on_ranks(3, [&](Group& group) {
        std::vector<Held> held;
        for (const Spec& spec : {kSpecs[0], kSpecs[8]}) held.emplace_back(spec.name, spec.dtype, columns(spec.shape, group.rank(), 3));
        for (Held& one : held) std::fill(one.memory.begin(), one.memory.end(), std::byte{0x3f});
        const SaveFile file{"", views_of(held)};
        StagedSave save(group, std::span(&file, 1), path, options);
        std::vector<std::byte> memory(static_cast<size_t>(save.staging_bytes()));
        if (staged) {
          save.stage(memory);
          for (Held& one : held) std::fill(one.memory.begin(), one.memory.end(), std::byte{0});
        }
        save.write();
      });
    };
    ASSERT_EQ(save_staged(folder_ / "now.safetensors", false), all(3, kFine));
    ASSERT_EQ(save_staged(folder_ / "staged.safetensors", true), all(3, kFine));
    EXPECT_TRUE(bytes_of(folder_ / "staged.safetensors") == bytes_of(folder_ / "now.safetensors"));
  }
}

/// Memory that only copies reach, which happen when somebody waits for them.
class FakeDevice : public file::Devices {
 public:
  void* pin(size_t bytes) override { return (++pinned_, std::malloc(bytes)); }
  void unpin(void* memory) noexcept override { std::free((--pinned_, memory)); }
  std::unique_ptr<kernels::cuda::Copy> begin_copy(void* to, const void* from, size_t bytes, Device) override {
    most_ = std::max<int>(most_, pinned_);
    struct Late final : kernels::cuda::Copy {
      void* to;
      const void* from;
      size_t bytes;
      Late(void* t, const void* f, size_t b) : to(t), from(f), bytes(b) {}
      void wait() override { std::memcpy(to, from, bytes); }
    };
    return std::make_unique<Late>(to, from, bytes);
  }

  int pinned() const { return pinned_; }
  int most() const { return most_; }

 private:
  std::atomic<int> pinned_{0}, most_{0};
};

std::vector<TensorView> on_device(std::vector<TensorView> views) {
  for (TensorView& view : views) view.device = {Device::Kind::kCuda, 0, nullptr};
  return views;
}

/// What hold() gives without what is not cast, and a tensor of several chunks.
std::vector<Held> hold_much(const Sharding& sharding, int rank, int ranks, bool filled) {
  std::vector<Held> held = hold(sharding, rank, ranks, filled);
  std::erase_if(held, [](const Held& one) { return one.view.dtype == DType::kF8E4M3; });
  const Spec wide{"wide", DType::kF32, {5000, 1501}};
  Held& one = held.emplace_back(wide.name, wide.dtype, sharding(wide.shape, rank, ranks));
  if (!filled) return held;
  one.view.region.for_each_run([&](const Run& run) {
    for (int64_t i = 0; i < run.length * 4; ++i)
      one.memory[static_cast<size_t>(run.local_begin * 4 + i)] = value(wide, run.global_begin * 4 + i);
  });
  return held;
}

TEST_F(Checkpoint, OfDeviceMemoryPassesThroughPinnedChunks) {
  FakeDevice device;
  file::replace_devices(&device);
  for (const auto& [name, sharding] : kShardings) {
    for (const auto& dtype : {std::optional<DType>(), std::optional(DType::kF64)}) {
      SCOPED_TRACE(name);
      SaveOptions options;
      options.dtype = dtype;
      const auto save_from = [&, &how = sharding](const fs::path& path, bool from_device) {
        return on_ranks(3, [&](Group& group) {
          auto held = hold_much(how, group.rank(), 3, true);
          save(group, from_device ? on_device(views_of(held)) : views_of(held), path, options);
        });
      };
      ASSERT_EQ(save_from(folder_ / "host.safetensors", false), all(3, kFine));
      ASSERT_EQ(save_from(folder_ / "device.safetensors", true), all(3, kFine));
      EXPECT_TRUE(bytes_of(folder_ / "device.safetensors") == bytes_of(folder_ / "host.safetensors"));
      ASSERT_EQ(on_ranks(2,
                         [&](Group& group) {
                           auto held = hold_much(columns, group.rank(), 2, false), expected = hold_much(columns, group.rank(), 2, true);
                           load(group, on_device(views_of(held)), folder_ / "device.safetensors");
                           for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
                         }),
                all(2, kFine));
    }
  }
  file::replace_devices(nullptr);
  EXPECT_EQ(device.pinned(), 0);
  EXPECT_LE(device.most(),
            3 * 4);  // two chunks for each of three ranks that save, twice where stripes are exchanged; four for each of two that load
}

/// Kills the process, with all its ranks, at its n-th call.
class Death : public base::Syscalls {
 public:
  explicit Death(int after) : left_(after) {}
  int open(const char* path, int flags, mode_t mode) override { return (step(), Syscalls::open(path, flags, mode)); }
  int close(int fd) override { return (step(), Syscalls::close(fd)); }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return (step(), Syscalls::pwrite(fd, data, bytes, offset));
  }
  int ftruncate(int fd, off_t length) override { return (step(), Syscalls::ftruncate(fd, length)); }
  int fsync(int fd) override { return (step(), Syscalls::fsync(fd)); }
  int rename(const char* from, const char* to) override { return (step(), Syscalls::rename(from, to)); }
  int exchange(const char* a, const char* b) override { return (step(), Syscalls::exchange(a, b)); }
  int mkdir(const char* path, mode_t mode) override { return (step(), Syscalls::mkdir(path, mode)); }

 private:
  void step() {
    if (left_-- == 0) ::raise(SIGKILL);
  }
  std::atomic<int> left_;
};

TEST_F(Checkpoint, IsTheOldOneOrTheNewOneWhereverItsProcessDied) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  for (const int64_t limit : {int64_t{0}, int64_t{1} << 20}) {
    const auto path = folder_ / (limit == 0 ? "model.safetensors" : "model");
    version = 1;
    ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = limit}), all(3, kFine));
    int deaths = 0, seen_new = 0;
    for (bool died = true; died; ++deaths) {
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        Death death(deaths);
        base::replace_syscalls(&death);
        version = 2;
        ::_exit(save_as(path, rows, 3, {.max_shard_size = limit}) == all(3, kFine) ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      died = WIFSIGNALED(status);
      if (!died) EXPECT_EQ(WEXITSTATUS(status), 0);
      Held first(kSpecs[0].name, kSpecs[0].dtype, Region::whole(kSpecs[0].shape));
      load(*solo(), std::span(&first.view, 1), path, {.strict = false});
      version = first.memory[0] == (version = 1, value(kSpecs[0], 0)) ? 1 : 2;
      EXPECT_EQ(load_as(path, whole, 1), all(1, kFine)) << "killed at call " << deaths;
      seen_new += version == 2;
      version = 1;
      ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = limit}), all(3, kFine));  // clears away what the dead one left
      EXPECT_EQ(names().size(), limit == 0 ? 1u : 2u);
    }
    EXPECT_GT(deaths, 15);
    EXPECT_GT(seen_new, 1);
  }
  version = 0;
}

TEST_F(Checkpoint, OfADiskThatDoesHalfOfWhatItIsAskedIsWhole) {
  BadDisk disk(BadDisk::Call::kOpen, 0, 0);
  base::replace_syscalls(&disk);
  EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", flat, 3), all(3, kFine));
}

TEST_F(Checkpoint, ThatCannotBeReadIsOneErrorForAll) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  for (int after = 0;; ++after) {
    BadDisk disk(BadDisk::Call::kRead, after, EIO);
    base::replace_syscalls(&disk);
    const std::vector<int> codes = load_as(folder_ / "a.safetensors", rows, 2, false);
    base::replace_syscalls(nullptr);
    if (!disk.failed()) break;
    EXPECT_EQ(codes, all(2, static_cast<int>(Code::kIo)));
  }
  EXPECT_EQ(load_as(folder_ / "nothing.safetensors", rows, 2, false), all(2, static_cast<int>(Code::kNotFound)));
}

TEST_F(Checkpoint, ClearsAwayWhatADeadSaveLeft) {
  fs::create_directories(folder_ / ".a.safetensors.0123.tmp");
  std::ofstream(folder_ / ".a.safetensors.4567.tmp") << "half";
  std::ofstream(folder_ / ".another.safetensors.4567.tmp") << "somebody else's";
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", ".another.safetensors.4567.tmp"}));
}

TEST_F(Checkpoint, OfARankThatNeverComesTimesOutOnAll) {
  const SaveOptions options{.timeout = std::chrono::seconds(1)};
  EXPECT_EQ(on_ranks(3,
                     [&](Group& group) {
                       if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
                       auto held = hold(rows, group.rank(), 3, true);
                       save(group, views_of(held), folder_ / "a.safetensors", options);
                     }),
            all(3, static_cast<int>(Code::kTimeout)));
  EXPECT_TRUE(names().empty());
}

}  // namespace
}  // namespace shardow
