#include "base/machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <system_error>

#include "base/turns.h"

namespace shardow::base {

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string view_of_files() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  const auto mounts = std::filesystem::read_symlink("/proc/self/ns/mnt", error);
  return boot.empty() || error ? "" : boot + mounts.string();
}

std::string make_nonce() {
  if (turns != nullptr) return fmt::format("{:016x}", turns->draw());
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace shardow::base
