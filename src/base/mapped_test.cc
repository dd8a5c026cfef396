#include "base/mapped.h"

#include <random>

#include "base/folder_fixture.h"

namespace shardow::base {
namespace {

class MappedFiles : public InFolder {
 protected:
  std::string write(const Path& path, size_t bytes) {
    std::mt19937 random(1);
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random());
    std::ofstream(path, std::ios::binary) << text;
    return text;
  }
};

TEST_F(MappedFiles, AreLookedAtInAnyPart) {
  const Path path = folder_ / "a";
  const std::string text = write(path, 300'000);
  const Mapped mapped(File::open(path));
  if (mapped.look(0, 1).empty()) GTEST_SKIP() << "this kernel or file system has no such mapping";
  for (const auto& [begin, bytes] :
       {std::pair<int64_t, int64_t>{0, 1}, {0, 300'000}, {4095, 2}, {1, 299'999}, {299'999, 1}, {8192, 4096}}) {
    const auto found = mapped.look(begin, bytes);
    ASSERT_EQ(found.size(), static_cast<size_t>(bytes)) << begin;
    const std::string_view as_text(reinterpret_cast<const char*>(found.data()), found.size());
    EXPECT_EQ(as_text, std::string_view(text).substr(static_cast<size_t>(begin), static_cast<size_t>(bytes))) << begin;
    mapped.forget(found);
  }
  for (const auto& [begin, bytes] :
       {std::pair<int64_t, int64_t>{0, 300'001}, {300'000, 1}, {-1, 5}, {0, 0}, {INT64_MAX, 1}})
    EXPECT_TRUE(mapped.look(begin, bytes).empty()) << begin;
}

int64_t mapped_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "RssFile:" && status >> word) return std::stoll(word);
  }
  return 0;
}

TEST_F(MappedFiles, AreForgottenTogetherSoonAndAtTheEnd) {
  constexpr int64_t kAll = 16 << 20, kEach = 100'000;
  const Path path = folder_ / "a";
  write(path, kAll);
  const Mapped mapped(File::open(path));
  if (mapped.look(0, 1).empty()) GTEST_SKIP() << "this kernel or file system has no such mapping";
  const int64_t before = mapped_kib();
  {
    Forgetting forgetting;
    for (int64_t at = 0; at + kEach <= kAll; at += kEach) {
      forgetting.forget(mapped, mapped.look(at, kEach));
      EXPECT_LT(mapped_kib(), before + 4096) << at;
    }
    forgetting.forget(mapped, mapped.look(0, 2000));  // elsewhere
    forgetting.forget(mapped, {});
  }
  EXPECT_LT(mapped_kib(), before + 4096);
}

/// Looking at what is not there would end the process.
TEST_F(MappedFiles, AreNotLookedAtWhereTheyWereCutOff) {
  const Path path = folder_ / "a";
  write(path, 300'000);
  const Mapped mapped(File::open(path));
  fs::resize_file(path, 100'000);
  EXPECT_TRUE(mapped.look(200'000, 5000).empty());
  EXPECT_TRUE(mapped.look(90'000, 100'000).empty());
}

TEST_F(MappedFiles, AreNoneOfWhatCannotBeMapped) {
  write(folder_ / "empty", 0);
  for (const Path& path : {folder_ / "empty", Path("/dev/null"), folder_})
    EXPECT_TRUE(Mapped(File::open(path)).look(0, 1).empty()) << path;
}

}  // namespace
}  // namespace shardow::base
