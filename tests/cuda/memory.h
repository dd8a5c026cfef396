// Memory that the fake driver gives: a device's, and pinned memory of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace shardow::fake {

struct Block {
  std::byte* begin;
  size_t bytes, counted;  ///< counted: by allocated()
  bool pinned;
  uint64_t number;  ///< that no other block has had
};

/// Blocks of a device lie in pages of their own, which are out of reach when they are freed. Memory begins poisoned and
/// ends at the exact byte. Guarded by the lock of the streams, but Open.
class Memory {
 public:
  void start(bool guard);  ///< forgets all but pinned memory, of which the engine keeps some for later
  void* take(size_t bytes, bool pinned);
  bool give(void* memory);  ///< false: it is no block. Aborts where something was written behind its end
  size_t allocated() const { return allocated_; }
  const Block* find(const void* memory) const;  ///< null: it lies in none
  bool has(uint64_t number) const;

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
  void protect(bool open) const;

  std::map<const void*, Block> blocks_;
  size_t allocated_ = 0, used_ = 0;  // used_: of the arena; nothing lies behind
  uint64_t last_number_ = 0;
  bool guard_ = false;
};

}  // namespace shardow::fake
