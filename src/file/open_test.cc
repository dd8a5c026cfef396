// Reading without a group: what is told, what is read, and what is refused. docs/file_format.md shows the example of
// this file.
#include <sys/resource.h>

#include <atomic>
#include <random>

#include "file/checkpoint_fixture.h"
#include "file/crc.h"
#include "shardow/checkpoint.h"

namespace shardow {
namespace {

std::vector<std::byte> values_of(const Spec& spec) {
  std::vector<std::byte> bytes(static_cast<size_t>(Region::whole(spec.shape).size() * dtype_bits(spec.dtype) / 8));
  fill(spec, 0, bytes);
  return bytes;
}

std::vector<std::byte> read_whole(const Checkpoint& opened, const std::string& name) {
  const StoredTensor tensor = opened.tensor(name);
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
  opened.read(name, 0, Region::whole(tensor.shape).size(), bytes);
  return bytes;
}

/// A file of one tensor, as anybody could have written it.
void write_file(const fs::path& path, const std::string& name, const std::string& dtype, int64_t elements,
                const std::string& data) {
  const std::string json = "{\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + std::to_string(elements) +
                           "],\"data_offsets\":[0," + std::to_string(data.size()) + "]}}";
  std::string length(8, '\0');
  for (size_t i = 0; i < 4; ++i) length[i] = static_cast<char>(json.size() >> (8 * i));
  std::ofstream(path, std::ios::binary) << length << json << data;
}

class Opening : public Checkpoints {
 protected:
  ~Opening() override { version = 0; }

  fs::path saved(const std::string& name, int64_t max_shard_size = 0) {
    SaveOptions options;
    options.max_shard_size = max_shard_size;
    options.metadata = {{"who", "me"}};
    EXPECT_EQ(save_as(folder_ / name, whole, 1, options), all(1, kFine));
    return folder_ / name;
  }

  static void expect(Code code, const std::string& message, const std::function<void()>& fn) {
    try {
      fn();
      ADD_FAILURE() << "nothing was thrown: " << message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }
};

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
    write_file(folder_ / "another", "t0", "U8", 4, "none");
    fs::rename(folder_ / "another", folder_ / "t0.safetensors");
    expect(Code::kIo, "was closed, since too many files were open, and replaced", [&] { read_whole(opened, "t0"); });
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
  const base::CallsTo counted(&disk);
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

TEST_F(Opening, WhatIsNotThereOrDoesNotFitIsNamed) {
  const Checkpoint opened = Checkpoint::open(saved("a.safetensors"));
  std::vector<std::byte> bytes(40);
  const auto read = [&](const char* name, int64_t begin, int64_t end) {
    return [&, name, begin, end] { opened.read(name, begin, end, bytes); };
  };
  expect(Code::kNotFound, "has no tensor 'other'", [&] { opened.tensor("other"); });
  expect(Code::kNotFound, "has no tensor 'other'", read("other", 0, 1));
  expect(Code::kInvalidArgument, "'counts' has 13 elements; [9, 14) are not among them", read("counts", 9, 14));
  expect(Code::kInvalidArgument, "[-1, 4) are not among them", read("counts", -1, 4));
  expect(Code::kInvalidArgument, "[5, 4) are not among them", read("counts", 5, 4));
  expect(Code::kInvalidArgument, "elements [0, 4) of 'counts' have 32 bytes, the memory for them 40",
         read("counts", 0, 4));
  expect(Code::kInvalidArgument, "'half' has shape [8, 5, 3] in the file and [8] here", [&] {
    opened.read({"half", DType::kBF16, Region::whole({8}), bytes.data()});
  });
  expect(Code::kInvalidArgument, "'flags' is BOOL in the file and F32 here", [&] {
    opened.read({"flags", DType::kF32, Region::whole({7}), bytes.data()});
  });
}

TEST_F(Opening, HalfBytesAreRefused) {
  write_file(folder_ / "a.safetensors", "x", "F4", 8, "abcd");
  const Checkpoint opened = Checkpoint::open(folder_ / "a.safetensors");
  std::vector<std::byte> bytes(2);
  opened.read("x", 2, 6, bytes);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), "bc");
  expect(Code::kUnsupported, "'x' is cut inside a byte of its F4 elements", [&] { opened.read("x", 1, 5, bytes); });
}

TEST_F(Opening, WhatIsNoCheckpointIsRefusedAtOnce) {
  expect(Code::kNotFound, "none.safetensors", [&] { Checkpoint::open(folder_ / "none.safetensors"); });
  expect(Code::kNotFound, "has neither model.safetensors.index.json nor model.safetensors",
         [&] { Checkpoint::open(folder_); });
  expect(Code::kNotFound, "ema-1.safetensors is not there",
         [&] { Checkpoint::open_files(folder_, {"ema-1.safetensors"}); });
  std::ofstream(folder_ / "notes.txt") << "abc";
  expect(Code::kNotFound, "has neither", [&] { Checkpoint::open(folder_); });
  std::ofstream(folder_ / "short.safetensors") << "abc";
  expect(Code::kInvalidArgument, "nor model.safetensors; what is there: short.safetensors",
         [&] { Checkpoint::open(folder_); });
  expect(Code::kCorrupt, "short.safetensors", [&] { Checkpoint::open(folder_ / "short.safetensors"); });
  write_file(folder_ / "bad.safetensors", "x", "U8", 5, "abcd");  // a byte is missing
  expect(Code::kCorrupt, "'x'", [&] { Checkpoint::open(folder_ / "bad.safetensors"); });
  std::ofstream(folder_ / "model.safetensors.index.json") << R"({"weight_map":{"x":"../bad.safetensors"}})";
  expect(Code::kCorrupt, "../bad.safetensors", [&] { Checkpoint::open(folder_); });
  std::ofstream(folder_ / "model.safetensors.index.json") << R"({"weight_map":{"x":"part.safetensors"}})";
  expect(Code::kCorrupt, "part.safetensors is not there, though the index names it",
         [&] { Checkpoint::open(folder_); });
}

TEST_F(Opening, AnIndexNamesNoFileOutsideOfItsDirectory) {
  const fs::path outside = saved("outside.safetensors");
  fs::create_directory(folder_ / "model");
  for (const std::string& file : {std::string("../outside.safetensors"), outside.string()}) {
    std::ofstream(folder_ / "model" / "model.safetensors.index.json") << R"({"weight_map":{"half":")" << file << "\"}}";
    expect(Code::kCorrupt, "only plain names of files beside the index are followed",
           [&] { Checkpoint::open(folder_ / "model"); });
  }
}

TEST_F(Opening, BytesThatAreNotWhatWasSavedAreNoticedWhereAllAreRead) {
  const fs::path path = saved("a.safetensors");
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('!');
  }
  const Checkpoint opened = Checkpoint::open(path);
  int bad = 0;
  for (const Spec& spec : kSpecs) {
    if (opened.tensor(spec.name).bytes == 0) continue;
    try {
      EXPECT_EQ(read_whole(opened, spec.name), values_of(spec)) << spec.name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt) << error.what();
      ++bad;
    }
  }
  EXPECT_EQ(bad, 1);
}

TEST_F(Opening, AFileThatWasWrittenOverIsNoticed) {
  const fs::path path = saved("a.safetensors");
  const Checkpoint opened = Checkpoint::open(path);
  fs::last_write_time(path, fs::file_time_type::clock::now() + std::chrono::seconds(1));
  std::vector<std::byte> bytes(8);
  expect(Code::kIo, "was written over since it was opened", [&] { opened.read("counts", 0, 1, bytes); });
}

}  // namespace
}  // namespace shardow
