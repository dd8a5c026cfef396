#include "file/ownership.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace shardow::file {
namespace {

std::vector<Shared> named(const std::vector<std::string>& names) {
  std::vector<Shared> all;
  for (const std::string& name : names) all.push_back({name, DType::kF32, {1}, {}});
  return all;
}

TEST(Finder, FindsNamesInWhateverOrderTheyCome) {
  const std::vector<Shared> tensors = named({"a", "b", "c", "d"});
  Finder finder(tensors);
  for (const std::string order : {"abcd", "dcba", "aabbdd", "cdabca", "dadada"}) {
    for (const char name : order)
      EXPECT_EQ(finder.find(std::string(1, name)), static_cast<size_t>(name - 'a')) << name << " of " << order;
  }
}

TEST(Finder, DoesNotFindWhatIsNotThere) {
  const std::vector<Shared> tensors = named({"b", "d"}), none;
  Finder finder(tensors), empty(none);
  for (const std::string order : {"a", "e", "bc", "dcb", "dde", "bbd"}) {
    for (const char name : order) {
      const std::optional<size_t> wanted = name == 'b'   ? std::optional<size_t>(0)
                                           : name == 'd' ? std::optional<size_t>(1)
                                                         : std::nullopt;
      EXPECT_EQ(finder.find(std::string(1, name)), wanted) << name << " of " << order;
      EXPECT_EQ(empty.find(std::string(1, name)), std::nullopt);
    }
  }
}

}  // namespace
}  // namespace shardow::file
