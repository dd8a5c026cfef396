// Memory that the fake driver gives: a device's, and pinned memory of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

namespace shardow::fake {

/// Device memory, and what lies where. Guarded by the lock of the streams, but open().
class Memory {
 public:
  void start(bool guard);  ///< forgets what was given, but pinned memory
  void* take(size_t bytes, bool pinned);
  bool give(void* memory);  ///< false: was not taken
  size_t allocated() const { return allocated_; }
  bool pinned(const void* memory) const;
  uint64_t block_of(const void* memory) const;  ///< a number that no other block has had; 0: none
  bool has(uint64_t block) const;
  std::optional<std::pair<const void*, size_t>> range_of(const void* memory) const;  ///< (begin, bytes) of its block

  /// With a guard: device memory is within reach while one of these lives, whose thread is the only one that works.
  class Open {
   public:
    explicit Open(Memory& memory) : memory_(memory) { memory_.protect(true); }
    ~Open() { memory_.protect(false); }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    Memory& memory_;
  };

 private:
  struct Block {
    size_t bytes, counted;
    bool pinned, in_arena;
    uint64_t number;
  };

  void protect(bool open) const;
  void* take_from_arena(size_t bytes);
  std::map<const void*, Block>::const_iterator find(const void* memory) const;

  std::map<const void*, Block> blocks_;
  size_t allocated_ = 0;
  uint64_t last_block_ = 0;
  bool guard_ = false;
  std::map<size_t, size_t> free_;  // of the arena: begin, bytes
  size_t used_ = 0;                // of the arena: nothing lies behind
};

}  // namespace shardow::fake
