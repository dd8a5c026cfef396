// For tests of Checkpoint: checkpoints of known values, and files as anybody could have written them.
#pragma once

#include "file/checkpoint_fixture.h"
#include "shardow/checkpoint.h"

namespace shardow {

inline std::vector<std::byte> values_of(const Spec& spec) {
  std::vector<std::byte> bytes(static_cast<size_t>(Region::whole(spec.shape).size() * dtype_bits(spec.dtype) / 8));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = value(spec, static_cast<int64_t>(i));
  return bytes;
}

inline std::vector<std::byte> read_whole(const Checkpoint& opened, const std::string& name) {
  const StoredTensor tensor = opened.tensor(name);
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
  opened.read(name, 0, Region::whole(tensor.shape).size(), bytes);
  return bytes;
}

/// A file of one tensor, as anybody could have written it.
inline void write_file(const fs::path& path, const std::string& name, const std::string& dtype, int64_t elements,
                       const std::string& data) {
  const std::string json = "{\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + std::to_string(elements) +
                           "],\"data_offsets\":[0," + std::to_string(data.size()) + "]}}";
  std::string length(8, '\0');
  for (size_t i = 0; i < 4; ++i) length[i] = static_cast<char>(json.size() >> (8 * i));
  std::ofstream(path, std::ios::binary) << length << json << data;
}

class Opening : public Checkpoints {
 protected:
  ~Opening() override { version = 0; }

  fs::path saved(const std::string& name, int64_t max_shard_size = 0) {
    SaveOptions options;
    options.max_shard_size = max_shard_size;
    options.metadata = {{"who", "me"}};
    EXPECT_EQ(save_as(folder_ / name, whole, 1, options), all(1, kFine));
    return folder_ / name;
  }

  static void expect(Code code, const std::string& message, const std::function<void()>& fn) {
    try {
      fn();
      ADD_FAILURE() << "nothing was thrown: " << message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }
};

}  // namespace shardow
