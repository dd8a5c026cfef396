// Memory that processes of one machine share. It has no name in any file system: nothing is left when they die.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace shardow::base {

class SharedMemory {
 public:
  /// New memory, all zero. Throws kIo.
  static SharedMemory create(size_t bytes);

  /// What another process made, by its address(); nothing where this process can't reach it, as from another machine or
  /// container. An address may lead to something else there: compare what is in it.
  static std::optional<SharedMemory> open(const std::string& address, size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::string address() const;  ///< for open(), as long as this lives
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  SharedMemory(int fd, std::span<std::byte> bytes) noexcept : fd_(fd), bytes_(bytes) {}
  int fd_;
  std::span<std::byte> bytes_;
};

}  // namespace shardow::base
