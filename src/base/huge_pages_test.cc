#include "base/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

namespace shardow::base {
namespace {

constexpr size_t kSize = size_t{8} << 20;

/// The kernel's flags of the mapping that has `address`.
std::string flags_at(const void* address) {
  const auto wanted = reinterpret_cast<unsigned long>(address);
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      inside = begin <= wanted && wanted < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return "";
}

bool advised(const void* address) {
  const std::string flags = flags_at(address);
  EXPECT_NE(flags, "");
  return flags.find(" hg ") != std::string::npos;
}

TEST(HugePages, WholePagesOfTheMemoryAreAdvisedAndNothingIsTouched) {
  const bool possible = std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").good();
  void* memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::span<std::byte> all(static_cast<std::byte*>(memory), kSize);
  std::byte* const middle = all.data() + kSize / 2;
  prefer_huge_pages(all.subspan(1, size_t{1} << 20));  // has no whole page
  prefer_huge_pages({});
  EXPECT_FALSE(advised(middle));
  prefer_huge_pages(all);
  EXPECT_EQ(advised(middle), possible);
  EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](std::byte one) { return one == std::byte{0}; }));
  munmap(memory, kSize);
}

}  // namespace
}  // namespace shardow::base
