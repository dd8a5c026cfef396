#include "base/nonce.h"

#include <fmt/format.h>

#include <random>

#include "base/turns.h"

namespace shardow::base {

std::string make_nonce() {
  if (turns != nullptr) return fmt::format("{:016x}", turns->draw());
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace shardow::base
