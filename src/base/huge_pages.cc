#include "base/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace shardow::base {
namespace {
constexpr uintptr_t kHugePage = uintptr_t{2} << 20;  // of x86-64, and of ARM with pages of 4 KiB
}

void prefer_huge_pages(std::span<std::byte> bytes) noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + bytes.size()) / kHugePage * kHugePage;
  if (first < last) {
    madvise(bytes.data() + (first - begin), last - first, MADV_HUGEPAGE);
  }
}

}  // namespace shardow::base
