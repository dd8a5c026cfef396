#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace shardow::fake {
namespace {

constexpr size_t kArena = size_t{1} << 30, kPage = 4096, kAlignment = 256;
constexpr int kPoison = 0xa5;

/// Addresses alone, until something is taken.
std::byte* arena() {
  static void* const begin = ::mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return static_cast<std::byte*>(begin);
}

size_t up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace

void Memory::start(bool guard) {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    if (block->second.pinned) {  // the engine keeps some for later
      block->second.counted = 0;
      ++block;
      continue;
    }
    if (!block->second.in_arena) std::free(const_cast<void*>(block->first));
    block = blocks_.erase(block);
  }
  allocated_ = 0;
  if (used_ > 0) ::mprotect(arena(), up(used_, kPage), PROT_NONE);
  guard_ = guard;
  free_ = {{0, kArena}};
  used_ = 0;
}

void* Memory::take(size_t bytes, bool pinned) {
  if (bytes > kArena) return nullptr;
  const bool in_arena = guard_ && !pinned;
  void* const memory =
      in_arena ? take_from_arena(up(bytes + 1, kAlignment)) : std::aligned_alloc(kAlignment, up(bytes + 1, kAlignment));
  if (memory == nullptr) return nullptr;
  blocks_[memory] = {bytes, bytes, pinned, in_arena, ++last_block_};
  allocated_ += bytes;
  protect(true);
  std::memset(memory, kPoison, bytes);  // a device's memory has anything in it
  protect(false);
#if defined(__SANITIZE_ADDRESS__)
  if (!in_arena) ASAN_POISON_MEMORY_REGION(static_cast<std::byte*>(memory) + bytes, up(bytes + 1, kAlignment) - bytes);
#endif
  return memory;
}

/// The first gap that is wide enough.
void* Memory::take_from_arena(size_t bytes) {
  for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
    const auto [begin, length] = *gap;
    if (length < bytes) continue;
    free_.erase(gap);
    if (length > bytes) free_[begin + bytes] = length - bytes;
    used_ = std::max(used_, begin + bytes);
    return arena() + begin;
  }
  return nullptr;
}

bool Memory::give(void* memory) {
  const auto entry = blocks_.find(memory);
  if (entry == blocks_.end()) return false;
  const Block block = entry->second;
  blocks_.erase(entry);
  allocated_ -= block.counted;
  if (!block.in_arena) {
    std::free(memory);
    return true;
  }
  const auto begin = static_cast<size_t>(static_cast<std::byte*>(memory) - arena());
  auto gap = free_.emplace(begin, up(block.bytes + 1, kAlignment)).first;
  if (const auto after = std::next(gap); after != free_.end() && gap->first + gap->second == after->first) {
    gap->second += after->second;
    free_.erase(after);
  }
  if (gap != free_.begin() && std::prev(gap)->first + std::prev(gap)->second == gap->first) {
    std::prev(gap)->second += gap->second;
    free_.erase(gap);
  }
  return true;
}

std::map<const void*, Memory::Block>::const_iterator Memory::find(const void* memory) const {
  const auto after = blocks_.upper_bound(memory);
  if (after == blocks_.begin()) return blocks_.end();
  const auto entry = std::prev(after);
  return memory < static_cast<const std::byte*>(entry->first) + entry->second.bytes ? entry : blocks_.end();
}

bool Memory::pinned(const void* memory) const {
  const auto entry = find(memory);
  return entry != blocks_.end() && entry->second.pinned;
}

uint64_t Memory::block_of(const void* memory) const {
  const auto entry = find(memory);
  return entry != blocks_.end() ? entry->second.number : 0;
}

std::optional<std::pair<const void*, size_t>> Memory::range_of(const void* memory) const {
  const auto entry = find(memory);
  return entry != blocks_.end() ? std::optional(std::pair(entry->first, entry->second.bytes)) : std::nullopt;
}

bool Memory::has(uint64_t number) const {
  return std::any_of(blocks_.begin(), blocks_.end(), [&](const auto& block) { return block.second.number == number; });
}

void Memory::protect(bool open) const {
  if (guard_ && used_ > 0) ::mprotect(arena(), up(used_, kPage), open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

}  // namespace shardow::fake
