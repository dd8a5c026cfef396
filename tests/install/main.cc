// Averages, a file and an error, through the installed headers and library alone.
#include <shardow/average.h>
#include <shardow/checkpoint.h>
#include <shardow/ema_file.h>
#include <shardow/error.h>

#include <cstdio>
#include <vector>

namespace {

/// A class of the library's, derived outside of it: casts and exceptions cross its boundary.
class Counted : public shardow::Group {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  std::vector<std::string> all_gather(std::string_view mine, shardow::Deadline) override { return {std::string(mine)}; }
  void all_reduce(std::span<uint64_t>, Op, shardow::Deadline) override {}
  void broadcast(std::span<std::byte>, int, shardow::Deadline) override {}
  void send(std::span<const std::byte>, int, shardow::Deadline) override {}
  void recv(std::span<std::byte>, int, shardow::Deadline) override {}
};

class Mine : public shardow::Error {
 public:
  Mine() : Error(shardow::Code::kCorrupt, "mine") {}
};

/// What the program throws goes through the library and is what it was; what it derived is told from what the library
/// derived.
bool types_cross(shardow::Group& group) {
  const auto theirs = shardow::solo();
  if (dynamic_cast<Counted*>(&group) == nullptr || dynamic_cast<Counted*>(theirs.get()) != nullptr) return false;
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

  Counted group;
  shardow::save(group, ema, path);
  std::vector<float> loaded(6);
  const std::vector<shardow::TensorView> into = {
      {"w", shardow::DType::kF32, shardow::Region::whole({2, 3}), loaded.data()}};
  if (!types_cross(group)) return 2;
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
