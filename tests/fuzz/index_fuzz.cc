// Any bytes as an index: refused as corrupt, or plain file names, which can be written again and read the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "file/index.h"
#include "shardow/error.h"

using namespace shardow;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const file::WeightMap weights = file::parse_index({reinterpret_cast<const char*>(data), size}, "fuzz");
    for (const auto& [name, file] : weights) {
      if (file.empty() || file == ".." || file.find('/') != std::string::npos) std::abort();
    }
    if (file::parse_index(file::index_bytes(weights, 1), "again") != weights) std::abort();
  } catch (const Error& error) {
    if (error.code() != Code::kCorrupt) std::abort();
  }
  return 0;
}
