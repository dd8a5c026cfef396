// For tests of files: a folder of the test's own.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace shardow {

namespace fs = std::filesystem;

inline std::string bytes_of(const fs::path& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(bytes).str();
}

class InFolder : public testing::Test {
 protected:
  InFolder() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~InFolder() override { fs::remove_all(folder_); }

  fs::path folder_ = fs::path(testing::TempDir()) / ("shardow_test_" + std::to_string(::getpid()));
};

}  // namespace shardow
