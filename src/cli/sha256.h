// SHA-256 (FIPS 180-4), as sha256sum prints it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace shardow::cli {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void add(std::span<const std::byte> bytes);
  std::string hex();  ///< 64 digits; once

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shardow::cli
