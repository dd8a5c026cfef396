// Averages, a file and an error, through the installed headers and library alone.
#include <shardow/average.h>
#include <shardow/checkpoint.h>
#include <shardow/ema_file.h>
#include <shardow/error.h>
#include <shardow/store.h>

#include <cstdio>
#include <map>
#include <vector>

namespace {

/// A class of the library's, derived outside of it: casts and exceptions cross its boundary.
class Alone : public shardow::Store {
 public:
  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  std::optional<std::string> get(const std::string& key, shardow::Deadline) override { return values_.at(key); }
  bool check(const std::string& key) override { return values_.contains(key); }
  int64_t add(const std::string&, int64_t amount) override { return amount; }
  std::string compare_set(const std::string&, const std::string&, const std::string& desired) override {
    return desired;
  }
  void erase(const std::string& key) override { values_.erase(key); }

 private:
  std::map<std::string, std::string> values_;
};

class Mine : public shardow::Error {
 public:
  Mine() : Error(shardow::Code::kCorrupt, "mine") {}
};

/// What the program throws goes through the library and is what it was.
bool types_cross(shardow::Group& group) {
  try {
    shardow::agree(group, std::chrono::steady_clock::now() + std::chrono::seconds(1), [] { throw Mine(); });
  } catch (const Mine& error) {
    return error.code() == shardow::Code::kCorrupt;
  }
  return false;
}

int run(const char* path) {
  std::vector<float> weights = {1, 2, 3, 4, 5, 6};
  const std::vector<shardow::TensorView> views = {
      {"w", shardow::DType::kF32, shardow::Region::whole({2, 3}), weights.data()}};
  shardow::Average ema(views, {.schedules = {shardow::Schedule::constant(0.5)}});
  for (float& weight : weights) weight += 1;
  ema.update();

  const auto group = shardow::store_group(std::make_unique<Alone>(), 0, 1);
  shardow::save(*group, ema, path);
  std::vector<float> loaded(6);
  const std::vector<shardow::TensorView> into = {
      {"w", shardow::DType::kF32, shardow::Region::whole({2, 3}), loaded.data()}};
  if (!types_cross(*group)) return 2;
  shardow::load(*shardow::solo(), into, path);
  if (loaded != std::vector<float>{1.5, 2.5, 3.5, 4.5, 5.5, 6.5}) return 3;
  try {
    shardow::Checkpoint::open("/there/is/no.safetensors");
  } catch (const shardow::Error& error) {
    std::printf("%s\n", error.what());
    return error.code() == shardow::Code::kNotFound ? 0 : 4;
  }
  return 5;
}

}  // namespace

int main(int argc, char** argv) {
  return argc == 2 ? run(argv[1]) : 1;
}
