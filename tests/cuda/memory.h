// Memory that the fake driver gives: a device's, and pinned memory of the host.
#pragma once

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>

#include "emulation.h"

namespace shardow::fake {

struct Block {
  std::byte* begin = nullptr;
  size_t bytes = 0, counted = 0;  ///< counted: by allocated()
  bool pinned = false;
  uint64_t number = 0;  ///< that no other block has had; 0: none
};

/// Blocks of a device lie in pages of their own, which are out of reach when they are freed. Memory begins poisoned and
/// ends at the exact byte. Guarded by the lock of the streams, but protect().
class Memory {
 public:
  /// Forgets all but pinned memory, of which the engine keeps some for later
  void start(bool guard) {
    std::erase_if(blocks_, [](const auto& entry) { return !entry.second.pinned; });
    for (auto& [memory, block] : blocks_) block.counted = 0;
    allocated_ = 0;
    ASAN_UNPOISON_MEMORY_REGION(arena(), used_);
    ::mprotect(arena(), used_, PROT_NONE);
    ::madvise(arena(), used_, MADV_DONTNEED);
    used_ = 0;
    guard_ = guard;
  }
  void* take(size_t bytes, bool pinned) {
    if (bytes > kArena - in_pages(used_)) return nullptr;
    const size_t whole = in_pages(bytes);
    std::byte* const begin = pinned ? static_cast<std::byte*>(std::aligned_alloc(kPage, whole)) : arena() + used_;
    if (!pinned) {
      ::mprotect(begin, whole, PROT_READ | PROT_WRITE);
      used_ += whole;
    }
    std::memset(begin, kPoison, whole);  // a device's memory has anything in it
    ASAN_POISON_MEMORY_REGION(begin + bytes, whole - bytes);
    if (!pinned && guard_) ::mprotect(begin, whole, PROT_NONE);
    blocks_[begin] = {begin, bytes, bytes, pinned, ++last_number_};
    allocated_ += bytes;
    return begin;
  }
  /// False: it is no block. Aborts where something was written behind its end
  bool give(void* memory) {
    const auto entry = blocks_.find(memory);
    if (entry == blocks_.end()) return false;
    const auto [begin, bytes, counted, pinned, number] = entry->second;
    const size_t whole = in_pages(bytes);
    blocks_.erase(entry);
    allocated_ -= counted;
    if (!pinned) ::mprotect(begin, whole, PROT_READ | PROT_WRITE);
    ASAN_UNPOISON_MEMORY_REGION(begin + bytes, whole - bytes);
    if (std::any_of(begin + bytes, begin + whole, [](std::byte byte) { return byte != std::byte{kPoison}; }))
      give_up("something was written behind the end of " + std::to_string(bytes) + " bytes");
    if (pinned) {
      std::free(begin);
    } else {
      guard_ ? static_cast<void>(std::memset(begin, kPoison, whole))
             : static_cast<void>(::madvise(begin, whole, MADV_DONTNEED));
      ::mprotect(begin, whole, PROT_NONE);
    }
    return true;
  }
  /// Makes two allocations of one, the first of so many bytes: on a device they may lie one behind the other.
  void split(void* memory, size_t bytes) {
    Block& first = blocks_.at(memory);
    blocks_[first.begin + bytes] = {first.begin + bytes, first.bytes - bytes, 0, first.pinned, ++last_number_};
    first.bytes = bytes;
  }
  size_t allocated() const { return allocated_; }
  /// The block that it lies in
  const Block& find(const void* memory) const {
    static const Block none;
    const auto after = blocks_.upper_bound(memory);
    const Block& block = after == blocks_.begin() ? none : std::prev(after)->second;
    return memory < block.begin + block.bytes ? block : none;
  }

  /// With a guard: puts device memory out of reach, or within it while no other thread works
  void protect(bool yes) const {
    if (guard_) ::mprotect(arena(), used_, yes ? PROT_NONE : PROT_READ | PROT_WRITE);
  }

 private:
  static constexpr size_t kArena = size_t{64} << 30, kPage = 4096;
  static constexpr int kPoison = 0xa5;

  /// Addresses alone, until something is taken.
  static std::byte* arena() {
    static void* const begin = ::mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return static_cast<std::byte*>(begin);
  }
  static size_t in_pages(size_t bytes) {
    return (bytes + kPage) / kPage * kPage;  // a byte behind the end, or more
  }

  std::map<const void*, Block> blocks_;
  size_t allocated_ = 0, used_ = 0;  // used_: of the arena; nothing lies behind
  uint64_t last_number_ = 0;
  bool guard_ = false;
};

}  // namespace shardow::fake
