// For tests: counts calls of operator new, to show that a path allocates nothing, and refuses one of them. Replaces the
// program's operators, wherever it is included in it.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

namespace shardow::base {

inline std::atomic<long> num_allocations{0};
inline bool (*uncounted)() = nullptr;  // says whether this thread's do not count at this moment

inline void count_allocation() {
  if (uncounted == nullptr || !uncounted()) num_allocations.fetch_add(1, std::memory_order_relaxed);
}

/// How often `fn()` allocated, over all threads.
template <typename Fn>
long allocations_of(Fn&& fn) {
  const long before = num_allocations.load();
  fn();
  return num_allocations.load() - before;
}

inline std::atomic<long> allocations_until_refusal{-1};  // below 0: none is refused

/// fn() with its n-th allocation refused, counted from 0 over all threads; true if it threw std::bad_alloc.
template <typename Fn>
bool fails_at_allocation(long n, Fn&& fn) {
  allocations_until_refusal.store(n);
  bool failed = false;
  try {
    fn();
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  allocations_until_refusal.store(-1);
  return failed;
}

}  // namespace shardow::base

// Weak: several files of a program may include this. Not inlined: a compiler that sees malloc() behind new and free()
// behind delete takes the pairs for mistakes.
[[gnu::noinline, gnu::weak]] void* operator new(std::size_t bytes) {
  shardow::base::count_allocation();
  if (shardow::base::allocations_until_refusal.load() >= 0 &&
      shardow::base::allocations_until_refusal.fetch_sub(1) == 0) {
    throw std::bad_alloc();
  }
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline, gnu::weak]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  shardow::base::count_allocation();
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline, gnu::weak]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline, gnu::weak]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
