// What the ranks of one call owe each other: the same arguments, one error for all, and to come.
#include "file/call.h"

#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

TEST_F(Checkpoints, AtPathsThatAreNoneIsATypedErrorOnAllBeforeAnythingIsWritten) {
  fs::create_symlink("loop", folder_ / "loop");
  std::ofstream(folder_ / "a.safetensors") << "precious";
  const std::string nul = (folder_ / "a.safetensors").string() + std::string("\0.safetensors", 13);
  const std::pair<fs::path, Code> cases[] = {{folder_ / "loop" / "a.safetensors", Code::kIo},
                                             {folder_ / "loop", Code::kInvalidArgument},
                                             {folder_ / std::string(300, 'n'), Code::kIo},
                                             {folder_ / std::string(300, 'n') / "a.safetensors", Code::kIo},
                                             {nul, Code::kInvalidArgument}};
  for (const auto& [path, code] : cases) {
    SCOPED_TRACE(path.string());
    EXPECT_EQ(save_as(path, rows, 2), all(2, static_cast<int>(code)));
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", "loop"}));
  EXPECT_EQ(bytes_of(folder_ / "a.safetensors"), "precious");
}

TEST_F(Checkpoints, OfSeveralFilesHasANameForEach) {
  for (const auto& second : {"", "model.safetensors", "a/b.safetensors"}) {
    const auto codes = on_ranks(2, [&](Group& group) {
      auto held = hold(rows, group.rank(), 2, true);
      const std::vector<SaveFile> files = {{"model.safetensors", views_of(held)}, {second, views_of(held)}};
      save(group, files, folder_ / "several");
    });
    EXPECT_EQ(codes, all(2, static_cast<int>(Code::kInvalidArgument))) << second;
  }
  EXPECT_TRUE(names().empty());
}

TEST_F(Checkpoints, OfARankThatNeverComesTimesOutOnAll) {
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

TEST_F(Checkpoints, WithATimeoutThatNoClockHoldsAreSavedAndLoaded) {
  for (const int ranks : {1, 3}) {
    EXPECT_EQ(on_ranks(ranks,
                       [&](Group& group) {
                         auto held = hold(rows, group.rank(), ranks, true);
                         const fs::path path = folder_ / "a.safetensors";
                         save(group, views_of(held), path, {.timeout = std::chrono::milliseconds::max()});
                         load(group, views_of(held), path, {.timeout = std::chrono::milliseconds::max()});
                       }),
              all(ranks, kFine));
  }
}

TEST_F(Checkpoints, WhoseProgressCannotBeToldIsOneErrorForAllAtOnce) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 3), all(3, kFine));
  const std::string before = bytes_of(folder_ / "a.safetensors");
  for (const bool at_the_end : {false, true}) {
    const auto tell = [&](int64_t done, int64_t total) {
      if (!at_the_end || done >= total) throw Error(Code::kPeerFailed, "told no more");
    };
    for (const bool random_writes : {true, false}) {
      FrontToEnd storage;
      machine_ = random_writes ? nullptr : &storage;
      version = 7;
      SaveOptions options;
      options.progress = tell;
      EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 3, options), all(3, static_cast<int>(Code::kPeerFailed)));
      version = 0;
      EXPECT_EQ(bytes_of(folder_ / "a.safetensors"), before);
      EXPECT_EQ(names(), std::set<std::string>{"a.safetensors"});
      machine_ = nullptr;
    }
    EXPECT_EQ(on_ranks(3,
                       [&](Group& group) {
                         auto held = hold(rows, group.rank(), 3, false);
                         LoadOptions options;
                         options.progress = tell;
                         options.verify = at_the_end;
                         load(group, views_of(held), folder_ / "a.safetensors", options);
                       }),
              all(3, static_cast<int>(Code::kPeerFailed)));
  }
}

TEST_F(Checkpoints, OfRanksThatAreAskedForOtherThingsSaysWhichAndWritesNothing) {
  struct Case {
    void (*differ)(SaveOptions&, fs::path&, int rank);
    const char* message;
  };
  constexpr Case kCases[] = {
      {[](SaveOptions& options, fs::path&, int rank) { options.max_shard_size = rank == 2 ? 0 : 5'000'000'000; },
       "save(): ranks disagree. max_shard_size is 5 GB on rank 0 and none on rank 2"},
      {[](SaveOptions& options, fs::path&, int rank) { options.max_shard_size = 1000 + rank; },
       "save(): ranks disagree. max_shard_size is 1 KB on rank 0 and 1001 bytes on rank 1"},
      {[](SaveOptions& options, fs::path&, int rank) { options.checksums = rank != 1; },
       "save(): ranks disagree. checksums is on on rank 0 and off on rank 1"},
      {[](SaveOptions& options, fs::path&, int rank) {
         options.dtype = rank == 1 ? std::optional(DType::kF16) : std::nullopt;
       },
       "save(): ranks disagree. dtype is none on rank 0 and F16 on rank 1"},
  };
  for (const Case& c : kCases) {
    on_ranks(3, [&](Group& group) {
      auto held = hold(rows, group.rank(), 3, true);
      std::erase_if(held, [](const Held& one) { return one.view.name == "tiny"; });  // which no option casts
      SaveOptions options;
      fs::path path = folder_ / "d";
      c.differ(options, path, group.rank());
      try {
        save(group, views_of(held), path, options);
        ADD_FAILURE() << c.message;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kInvalidArgument);
        EXPECT_STREQ(error.what(), c.message);
      }
    });
    EXPECT_TRUE(names().empty());
  }
}

TEST_F(Checkpoints, HasTheMetadataOfRank0) {
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       auto held = hold(rows, group.rank(), 2, true);
                       SaveOptions options;
                       options.metadata = {{"rank", std::to_string(group.rank())}};
                       if (group.rank() == 1) options.metadata["much"] = std::string(9000, 'x');
                       save(group, views_of(held), folder_ / "a.safetensors", options);
                     }),
            all(2, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", columns, 3), all(3, kFine));
  const std::string bytes = bytes_of(folder_ / "a.safetensors");
  EXPECT_NE(bytes.find(R"("rank":"0")"), std::string::npos);
  EXPECT_EQ(bytes.find("much"), std::string::npos);
}

}  // namespace
}  // namespace shardow
