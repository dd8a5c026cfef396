#include "base/machine.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>

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

}  // namespace shardow::base
