// Bytes of a file where the kernel has them in memory anyhow: looked at there, not copied.
#pragma once

#include <cstdint>
#include <span>

#include "base/files.h"

namespace shardow::base {

/// All of a file that lies in memory as a whole or in part. For any thread.
///
/// A process that looks at bytes which the file no longer has, since somebody cut it off meanwhile, gets SIGBUS. look()
/// finds out as late as it can; who calls it handles the signal, too.
class Mapped {
 public:
  Mapped() = default;  ///< of nothing

  /// Nothing can be looked at where the file can't be mapped: a device, some FUSE mounts, no room for addresses.
  explicit Mapped(const File& file) noexcept;
  Mapped(Mapped&& other) noexcept;
  Mapped& operator=(Mapped&&) = delete;
  ~Mapped();

  /// Bytes [begin, begin + bytes) of the file; empty where they are not in memory, or not there: read them then. After
  /// it forget().
  std::span<const std::byte> look(int64_t begin, int64_t bytes) const noexcept;

  /// They count as this process's memory no longer. Nobody looks at them now.
  void forget(std::span<const std::byte> looked_at) const noexcept;

 private:
  std::span<std::byte> bytes_;
};

/// What one thread has looked at: neighbours are forgotten together, since every call interrupts the process's other
/// threads.
class Forgetting {
 public:
  Forgetting() = default;
  Forgetting(const Forgetting&) = delete;
  Forgetting& operator=(const Forgetting&) = delete;
  ~Forgetting() { now(); }

  /// Soon. `of` outlives it, or now() is called before.
  void forget(const Mapped& of, std::span<const std::byte> looked_at) noexcept;
  void now() noexcept;

 private:
  const Mapped* of_ = nullptr;
  std::span<const std::byte> bytes_;
};

}  // namespace shardow::base
