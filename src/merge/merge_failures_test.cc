// Merges on disks and from sources that fail, and on storage that takes files from front to end alone.
#include <atomic>

#include "base/files.h"
#include "merge/merging_fixture.h"

namespace shardow {
namespace {

/// A disk that is full after so many writes.
class Full final : public base::Syscalls {
 public:
  explicit Full(int writes) : left_(writes) {}
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    if (left_-- > 0) return Syscalls::pwrite(fd, data, bytes, offset);
    errno = ENOSPC;
    return -1;
  }

 private:
  std::atomic<int> left_;
};

/// Gives a checkpoint's tensors until it fails; counts the threads inside.
class Failing final : public MergeSource {
 public:
  Failing(Checkpoint opened, int reads) : opened_(std::move(opened)), left_(reads) {}
  std::vector<std::string> names() const override { return opened_.names(); }
  std::pair<DType, Shape> tensor(std::string_view name) const override {
    const StoredTensor stored = opened_.tensor(name);
    return {stored.dtype, stored.shape};
  }
  bool one_at_a_time() const override { return true; }
  void read(const TensorView& wanted) const override {
    EXPECT_EQ(inside_++, 0);
    const bool fails = left_-- == 0;
    if (!fails) opened_.read(wanted);
    --inside_;
    if (fails) throw Error(Code::kIo, "the source has failed");
  }

 private:
  Checkpoint opened_;
  mutable std::atomic<int> left_, inside_ = 0;
};

class MergeFailures : public Merging {
 protected:
  std::vector<MergeInput> two() const { return {saved("a.safetensors", kMixed, 1, 0.5), saved("b", kMixed, 2, 0.5)}; }
};

TEST_F(MergeFailures, WhereFilesAreWrittenFromFrontToEndBytesAreTheSame) {
  const std::vector<MergeInput> inputs = two();
  FrontToEnd storage;
  merge(*solo(), inputs, folder_ / "expected.safetensors");
  base::Syscalls* const there = &storage;
  for (const int ranks : {1, 3}) {
    const auto codes = on_ranks(ranks, [&](Group& group) {
      const base::CallsTo here(there);
      merge(group, inputs, folder_ / "out.safetensors");
    });
    EXPECT_EQ(codes, all(ranks, kFine));
    EXPECT_TRUE(bytes_of(folder_ / "out.safetensors") == bytes_of(folder_ / "expected.safetensors")) << ranks;
  }
  std::fstream(folder_ / "a.safetensors", std::ios::in | std::ios::out | std::ios::binary)
      .seekp(-2000, std::ios::end)
      .put('\x55');
  const MergeInput damaged{"a", Checkpoint::open(folder_ / "a.safetensors"), 0.5};
  expect_error(Code::kCorrupt, {"of a is not what was saved"}, [&] {
    const base::CallsTo here(there);
    merge(*solo(), {damaged, inputs[1]}, folder_ / "other.safetensors");
  });
  EXPECT_FALSE(fs::exists(folder_ / "other.safetensors"));
}

TEST_F(MergeFailures, AFullDiskLeavesWhatWasThere) {
  const std::vector<MergeInput> inputs = two();
  saved("out.safetensors", kMixed, 9, 1);
  const std::string old = bytes_of(folder_ / "out.safetensors");
  const auto before = names();
  for (int writes = 0; writes < 6; ++writes) {
    Full disk(writes);
    base::Syscalls* const there = &disk;
    const auto codes = on_ranks(2, [&](Group& group) {
      const base::CallsTo here(there);
      merge(group, inputs, folder_ / "out.safetensors");
    });
    EXPECT_EQ(codes, all(2, static_cast<int>(Code::kOutOfSpace))) << writes;
    EXPECT_TRUE(bytes_of(folder_ / "out.safetensors") == old);
    EXPECT_EQ(names(), before);
  }
}

TEST_F(MergeFailures, ASourceThatFailsOnOneRankFailsOnAll) {
  const std::vector<MergeInput> inputs = two();
  merge(*solo(), inputs, folder_ / "expected.safetensors");
  const auto before = names();
  for (const int reads : {0, 3, 1000}) {
    const auto codes = on_ranks(3, [&](Group& group) {
      std::vector<MergeInput> mine = inputs;
      mine[1].tensors =
          std::make_shared<Failing>(std::get<Checkpoint>(inputs[1].tensors), group.rank() == 1 ? reads : 1'000'000);
      merge(group, mine, folder_ / "out.safetensors");
    });
    EXPECT_EQ(codes, all(3, reads == 1000 ? kFine : static_cast<int>(Code::kIo))) << reads;
    if (reads < 1000) {
      EXPECT_EQ(names(), before);
    }
  }
  EXPECT_TRUE(bytes_of(folder_ / "out.safetensors") == bytes_of(folder_ / "expected.safetensors"));
}

TEST_F(MergeFailures, AnInputThatIsCutShortMeanwhileIsNoCrash) {
  const std::vector<MergeInput> inputs = two();
  fs::resize_file(folder_ / "a.safetensors", fs::file_size(folder_ / "a.safetensors") / 2);
  EXPECT_THROW(merge(*solo(), inputs, folder_ / "out.safetensors"), Error);
  EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
}

TEST_F(MergeFailures, ACallbackThatThrowsEndsItOnAllRanks) {
  const std::vector<MergeInput> inputs = two();
  const auto codes = on_ranks(2, [&](Group& group) {
    MergeOptions options;
    options.progress = [](int64_t, int64_t) { throw Error(Code::kInvalidArgument, "interrupted"); };
    merge(group, inputs, folder_ / "out.safetensors", options);
  });
  EXPECT_EQ(codes, all(2, static_cast<int>(Code::kInvalidArgument)));
  EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
}

}  // namespace
}  // namespace shardow
