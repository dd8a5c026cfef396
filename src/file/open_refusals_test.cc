// What is refused where a checkpoint is opened or read, and what is noticed.
#include "file/opening_fixture.h"

namespace shardow {
namespace {

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
