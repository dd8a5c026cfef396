// What save() and load() promise, with ranks as threads: any sharding to any other, the same bytes whoever saved them.
#include "shardow/checkpoint.h"

#include <sys/resource.h>

#include <atomic>

#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

TEST_F(Checkpoints, OfAnyShardingHasTheSameBytesAndLoadsIntoAnyOther) {
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

TEST_F(Checkpoints, OfSeveralFilesIsADirectoryWithAnIndex) {
  const SaveOptions options{.max_shard_size = 1 << 20};
  for (int round = 0; round < 2; ++round) {  // the second one replaces the first
    ASSERT_EQ(save_as(folder_ / "model", rows, 3, options), all(3, kFine));
    EXPECT_TRUE(fs::exists(folder_ / "model" / "model.safetensors.index.json"));
    EXPECT_EQ(fs::exists(folder_ / "model" / "model-00001-of-00003.safetensors"), round == 0);
    EXPECT_EQ(names(), (std::set<std::string>{"model"}));
  }
  EXPECT_EQ(load_as(folder_ / "model", columns, 2), all(2, kFine));
}

TEST_F(Checkpoints, LeavesWhatElseIsInItsDirectory) {
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

TEST_F(Checkpoints, CastsOnTheWayOutAndIn) {
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

TEST_F(Checkpoints, RefusesWhatDoesNotFitBeforeAnythingChanges) {
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
                       save(group, std::span(&held.view, 1),
                            folder_ / (group.rank() == 0 ? "x.safetensors" : "y.safetensors"));
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

TEST_F(Checkpoints, FindsEveryFlippedByteOfItsData) {
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

TEST_F(Checkpoints, OfSeveralNamedFilesAppearsWhole) {
  const auto save_both = [&](int ranks) {
    return on_ranks(ranks, [&](Group& group) {
      auto first = hold(rows, group.rank(), ranks, true), second = hold(columns, group.rank(), ranks, true);
      const std::vector<SaveFile> files = {{"a.safetensors", views_of(first), {{"which", "a"}}},
                                           {"b.safetensors", views_of(second)}};
      save(group, files, folder_ / "both");
    });
  };
  for (version = 1; version < 4; ++version) {  // other values each time
    EXPECT_EQ(save_both(3), all(3, kFine));
    EXPECT_EQ(load_as(folder_ / "both" / "a.safetensors", flat, 2), all(2, kFine));
    EXPECT_EQ(load_as(folder_ / "both" / "b.safetensors", flat, 2), all(2, kFine));
  }
  version = 0;
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "both"), {}), 3);  // with the list of their names
  EXPECT_EQ(on_ranks(1,
                     [&](Group& group) {
                       const std::vector<SaveFile> files = {{"../a.safetensors", {}}, {"b.safetensors", {}}};
                       save(group, files, folder_ / "both");
                     }),
            all(1, static_cast<int>(Code::kInvalidArgument)));
}

TEST_F(Checkpoints, ThatWasStagedHasTheValuesOfThatMoment) {
  for (const auto& dtype : {std::optional<DType>(), std::optional(DType::kBF16)}) {
    SaveOptions options;
    options.dtype = dtype;
    const auto save_staged = [&](const fs::path& path, bool staged) {
      return on_ranks(3, [&](Group& group) {
        std::vector<Held> held;
        for (const Spec& spec : {kSpecs[0], kSpecs[8]})
          held.emplace_back(spec.name, spec.dtype, columns(spec.shape, group.rank(), 3));
        for (Held& one : held) std::fill(one.memory.begin(), one.memory.end(), std::byte{0x3f});
        const SaveFile file{"", views_of(held)};
        StagedSave save(group, std::span(&file, 1), path, options);
        std::vector<std::byte> memory(save.staging_bytes());
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

/// Counts what reaches the kernel.
class Counted : public base::Syscalls {
 public:
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return (++reads, Syscalls::pread(fd, data, bytes, offset));
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return (++writes, Syscalls::pwrite(fd, data, bytes, offset));
  }
  std::atomic<int> reads{0}, writes{0};
};

TEST_F(Checkpoints, OfSmallTensorsIsWrittenAndReadInFewCalls) {
  const auto path = folder_ / "a.safetensors";
  const auto small = [&](bool filled) {
    std::vector<Held> held;
    for (int i = 0; i < 500; ++i) {
      const DType dtype = i % 3 == 0 ? DType::kBF16 : DType::kF32;
      Held& one = held.emplace_back("small" + std::to_string(i), dtype, Region::whole({i % 7 + 1, 5}));
      for (size_t b = 0; filled && b < one.memory.size(); ++b)
        one.memory[b] = static_cast<std::byte>(b * 3 + static_cast<size_t>(i));
    }
    return held;
  };
  for (const int ranks : {1, 2}) {
    Counted calls;
    machine_ = &calls;
    ASSERT_EQ(on_ranks(ranks,
                       [&](Group& group) {
                         auto held = small(true);
                         save(group, views_of(held), path);
                       }),
              all(ranks, kFine));
    EXPECT_LT(calls.writes, 20);
    ASSERT_EQ(on_ranks(ranks,
                       [&](Group& group) {
                         auto held = small(false), expected = small(true);
                         load(group, views_of(held), path);
                         for (size_t i = 0; i < held.size(); ++i)
                           EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
                       }),
              all(ranks, kFine));
    EXPECT_LT(calls.reads, 20);
    machine_ = nullptr;
  }
}

TEST_F(Checkpoints, OfMoreFilesThanMayBeOpenIsSavedAndLoaded) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto many = [](bool filled) {
    std::vector<Held> held;
    for (int i = 0; i < 150; ++i) {
      Held& one = held.emplace_back("t" + std::to_string(i), DType::kU8, Region::whole({16}));
      if (filled) std::fill(one.memory.begin(), one.memory.end(), static_cast<std::byte>(i));
    }
    return held;
  };
  SaveOptions options;
  options.max_shard_size = 16;
  const rlimit few{100, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  FrontToEnd storage;
  for (const bool random_writes : {true, false}) {
    machine_ = random_writes ? nullptr : &storage;
    EXPECT_EQ(on_ranks(2,
                       [&](Group& group) {
                         auto held = many(true), found = many(false);
                         save(group, views_of(held), folder_ / "model", options);
                         load(group, views_of(found), folder_ / "model");
                         for (size_t i = 0; i < held.size(); ++i)
                           EXPECT_EQ(held[i].memory, found[i].memory) << held[i].view.name;
                       }),
              all(2, kFine));
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(Checkpoints, OfMoreShortRunsThanAStripeOfEachRankHoldsIsWhole) {
  const std::vector<Spec> specs = {{"many stripes", DType::kF32, {5000, 1400}}, {"after", DType::kF32, {9}}};  // 28 MB
  const fs::path path = folder_ / "a.safetensors";
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       auto held = hold(columns, group.rank(), 2, true, specs);
                       save(group, views_of(held), path);
                     }),
            all(2, kFine));
  auto loaded = hold(whole, 0, 1, false, specs), expected = hold(whole, 0, 1, true, specs);
  load(*solo(), views_of(loaded), path);
  for (size_t i = 0; i < loaded.size(); ++i) EXPECT_EQ(loaded[i].memory, expected[i].memory) << specs[i].name;
}

}  // namespace
}  // namespace shardow
