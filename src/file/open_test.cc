// Reading without a group: what is told and what is read. docs/file_format.md shows the example of this file.
#include <sys/resource.h>

#include <atomic>
#include <random>

#include "file/crc.h"
#include "file/opening_fixture.h"

namespace shardow {
namespace {

size_t open_files() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& one : fs::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST_F(Opening, TellsWhatIsThere) {
  for (const auto& path : {saved("a.safetensors"), saved("model"), saved("shards", 1 << 20)}) {
    const Checkpoint opened = Checkpoint::open(path);
    EXPECT_EQ(opened.names().size(), kSpecs.size());
    for (const Spec& spec : kSpecs) {
      ASSERT_TRUE(opened.contains(spec.name));
      const StoredTensor tensor = opened.tensor(spec.name);
      EXPECT_EQ(tensor.dtype, spec.dtype);
      EXPECT_EQ(tensor.shape, spec.shape);
      EXPECT_EQ(tensor.bytes, static_cast<int64_t>(values_of(spec).size()));
      EXPECT_EQ(tensor.crc32, file::crc32(0, values_of(spec)));
      EXPECT_LT(tensor.file, opened.files().size());
    }
    EXPECT_FALSE(opened.contains("blocks"));
    EXPECT_EQ(opened.files().size(), path.filename() == "shards" ? 3u : 1u);
    for (const StoredFile& file : opened.files()) {
      EXPECT_TRUE(fs::is_regular_file(file.path)) << file.path;
      EXPECT_EQ(file.metadata, (std::map<std::string, std::string>{{"format", "pt"}, {"who", "me"}}));
      EXPECT_EQ(file.metadata, opened.metadata());
    }
  }
}

TEST_F(Opening, TheExampleOfTheDocs) {
  const fs::path path = saved("model");
  std::vector<float> rows;
  {
    const shardow::Checkpoint opened = shardow::Checkpoint::open(path);
    for (const std::string& name : opened.names()) {
      const shardow::StoredTensor tensor = opened.tensor(name);  // dtype, shape, bytes
      std::vector<std::byte> bytes(tensor.bytes);
      // Reads all of it, and compares with its checksum.
      opened.read(name, 0, shardow::Region::whole(tensor.shape).size(), bytes);
    }
    rows.resize(2 * 11);
    // Reads rows 3 and 4, as they are stored.
    opened.read("blocks.0.weight", 3 * 11, 5 * 11, std::as_writable_bytes(std::span(rows)));
    std::vector<double> column(37);
    const shardow::Region first = shardow::Region::grid({37, 11}, {{{0, 37}}, {{0, 1}}});
    opened.read({"blocks.0.weight", shardow::DType::kF64, first, column.data()});  // any region, converted
    EXPECT_EQ(column[3], static_cast<double>(rows[0]));
  }
  const std::vector<std::byte> expected = values_of(kSpecs[0]);
  EXPECT_EQ(std::memcmp(rows.data(), expected.data() + 3 * 11 * sizeof(float), 2 * 11 * sizeof(float)), 0);
}

TEST_F(Opening, ReadsAnyRangeAsItIsStored) {
  const Checkpoint opened = Checkpoint::open(saved("shards", 1 << 20));
  std::mt19937_64 random(7);
  for (const Spec& spec : kSpecs) {
    const std::vector<std::byte> expected = values_of(spec);
    EXPECT_EQ(read_whole(opened, spec.name), expected) << spec.name;
    const int64_t size = Region::whole(spec.shape).size(), each = dtype_bits(spec.dtype) / 8;
    for (int round = 0; round < 20; ++round) {
      const int64_t a = static_cast<int64_t>(random() % static_cast<uint64_t>(size + 1));
      const int64_t b = static_cast<int64_t>(random() % static_cast<uint64_t>(size + 1));
      const int64_t begin = std::min(a, b), end = std::max(a, b);
      std::vector<std::byte> bytes(static_cast<size_t>((end - begin) * each));
      opened.read(spec.name, begin, end, bytes);
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), expected.begin() + begin * each))
          << spec.name << ' ' << begin << ' ' << end;
    }
  }
}

TEST_F(Opening, ReadsRegions) {
  const Checkpoint opened = Checkpoint::open(saved("a.safetensors"));
  for (const auto& [name, sharding] : kShardings) {
    for (int rank = 0; rank < 3; ++rank) {
      auto held = hold(sharding, rank, 3, false);
      const auto expected = hold(sharding, rank, 3, true);
      for (const TensorView& view : views_of(held)) opened.read(view);
      for (size_t i = 0; i < held.size(); ++i)
        EXPECT_EQ(held[i].memory, expected[i].memory) << name << ' ' << held[i].view.name;
    }
  }
}

TEST_F(Opening, StaysWhatItWasWhateverHappensToThePath) {
  for (const int64_t size : {0, 1 << 20}) {
    version = 0;
    const fs::path path = saved("model", size);
    const Checkpoint opened = Checkpoint::open(path);
    version = 1;
    saved("model", size);
    fs::rename(path, folder_ / "elsewhere");
    version = 0;
    for (const Spec& spec : kSpecs) EXPECT_EQ(read_whole(opened, spec.name), values_of(spec)) << spec.name;
    fs::remove_all(folder_ / "elsewhere");
    for (const Spec& spec : kSpecs) EXPECT_EQ(read_whole(opened, spec.name), values_of(spec)) << spec.name;
    EXPECT_EQ(opened.files().size(), size == 0 ? 1u : 3u);
  }
}

TEST_F(Opening, FilesThatBelongTogetherAreOfOneVersion) {
  save_as(folder_ / "a.safetensors", whole, 1);
  save_as(folder_ / "b.safetensors", whole, 1);
  const std::vector<Checkpoint> opened = Checkpoint::open_files(folder_, {"b.safetensors", "a.safetensors"});
  ASSERT_EQ(opened.size(), 2u);
  EXPECT_EQ(opened[0].files()[0].path.filename(), "b.safetensors");
  EXPECT_EQ(read_whole(opened[1], "half"), values_of(kSpecs[2]));
  for (const char* name : {"a.safetensors", "c.safetensors"}) {
    expect(Code::kCorrupt, "d.safetensors is not there; what is there: a.safetensors, b.safetensors", [&] {
      Checkpoint::open_files(folder_, {"d.safetensors", name});
    });
  }
  expect(Code::kInvalidArgument, "is a file; a directory with",
         [&] { Checkpoint::open_files(folder_ / "a.safetensors", {"a.safetensors"}); });
}

TEST_F(Opening, KeepsFewFilesOpenAndClosesThemWithTheLastCopy) {
  constexpr int kFiles = 700;
  std::string map;
  for (int i = 0; i < kFiles; ++i) {
    const std::string name = "t" + std::to_string(i);
    write_file(folder_ / (name + ".safetensors"), name, "U8", 4, std::to_string(1000 + i));
    map += (map.empty() ? "" : ",") + ("\"" + name + "\":\"" + name + ".safetensors\"");
  }
  std::ofstream(folder_ / "model.safetensors.index.json") << "{\"weight_map\":{" << map << "}}";
  const size_t before = open_files();
  {
    const Checkpoint opened = Checkpoint::open(folder_), copy = opened;
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    EXPECT_LE(open_files() - before, std::min<size_t>(files.rlim_cur / 4, 512) + 1);  // and the directory
    for (int i = 0; i < kFiles; ++i) {
      const std::vector<std::byte> bytes = read_whole(copy, "t" + std::to_string(i));
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), std::to_string(1000 + i));
    }
    EXPECT_GT(open_files(), before);
  }
  EXPECT_EQ(open_files(), before);
}

class Counting : public base::Syscalls {
 public:
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    ++calls;
    return Syscalls::pread(fd, data, bytes, offset);
  }
  std::atomic<int> calls{0};
};

TEST_F(Opening, OneReadForEachTensorHoweverManyThereAre) {
  constexpr int kTensors = 2000;
  std::vector<Held> held;
  for (int i = 0; i < kTensors; ++i) held.emplace_back("t" + std::to_string(i), DType::kI64, Region::whole({2}));
  const auto group = solo();
  save(*group, views_of(held), folder_ / "a.safetensors");
  Counting disk;
  Environment here;
  here.syscalls = &disk;
  const file::InEnvironment counted(&here);
  const Checkpoint opened = Checkpoint::open(folder_ / "a.safetensors");
  const int headers = disk.calls;
  EXPECT_LE(headers, 8);
  for (const std::string& name : opened.names()) read_whole(opened, name);
  EXPECT_EQ(disk.calls - headers, kTensors);
}

TEST_F(Opening, AnyThreadReads) {
  const Checkpoint opened = Checkpoint::open(saved("shards", 1 << 20));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, copy = opened] {
      for (const Spec& spec : kSpecs) EXPECT_EQ(read_whole(copy, spec.name), values_of(spec)) << spec.name;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Opening, RanksOpenOneVersionAndLoadFromIt) {
  const fs::path path = saved("shards", 1 << 20);
  const auto codes = on_ranks(3, [&](Group& group) {
    const Checkpoint opened = Checkpoint::open(group, path, std::chrono::seconds(60));
    EXPECT_EQ(opened.names().size(), kSpecs.size());
    auto held = hold(rows, group.rank(), 3, false);
    const LoadReport report = load(group, views_of(held), opened);
    EXPECT_EQ(report.metadata, opened.metadata());
    const auto expected = hold(rows, group.rank(), 3, true);
    for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
  });
  EXPECT_EQ(codes, all(3, kFine));
}

}  // namespace
}  // namespace shardow
