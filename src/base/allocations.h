// For tests: counts calls of operator new, to show that a path allocates nothing. Replaces the program's operators: include it in one file
// of a test program.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

namespace shardow::base {

inline std::atomic<long> num_allocations{0};

/// How often `fn()` allocated, over all threads.
template <typename Fn>
long allocations_of(Fn&& fn) {
  const long before = num_allocations.load();
  fn();
  return num_allocations.load() - before;
}

}  // namespace shardow::base

void* operator new(std::size_t bytes) {
  shardow::base::num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  shardow::base::num_allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
