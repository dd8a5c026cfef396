// Any bytes as a header: refused as corrupt, or read into what can be written again and read the same. The first two
// bytes choose how much data follows.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "file/header_fixture.h"
#include "shardow/error.h"

using namespace shardow;

namespace {

void must(bool holds) {
  if (!holds) std::abort();
}

void round_trip(const file::Header& header) {
  const file::Header laid = file::lay_out(header.entries, header.metadata);
  const std::string bytes = file::header_bytes(laid.entries, laid.metadata, laid.data_begin);
  const file::Header again = file::parse_header(std::string_view(bytes).substr(8), file::data_size(laid), "again");
  must(file::data_size(laid) == file::data_size(header));
  must(again.metadata == header.metadata);
  must(again.entries.size() == header.entries.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const int64_t data_bytes = data[0] | data[1] << 8;
  const std::string_view json(reinterpret_cast<const char*>(data) + 2, size - 2);
  try {
    round_trip(file::parse_header(json, data_bytes, "fuzz"));
  } catch (const Error& error) {
    must(error.code() == Code::kCorrupt);
  }
  return 0;
}
