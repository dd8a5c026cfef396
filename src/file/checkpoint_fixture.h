// For tests of save() and load(): tensors of many kinds, shardings, ranks as threads, and a folder.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <span>
#include <thread>

#include "base/files.h"
#include "base/folder_fixture.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace shardow {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSlow = true;  // fewer rounds of the same
#else
constexpr bool kSlow = false;
#endif
inline const bool kAll = std::getenv("SHARDOW_ALL") != nullptr;  // the full matrices of `make test-all`

/// Storage that takes files only from front to end, as mounts of object stores do.
class FrontToEnd final : public base::Syscalls {
 public:
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    struct stat file {};
    if (::fstat(fd, &file) == 0 && file.st_size == offset) return Syscalls::pwrite(fd, data, bytes, offset);
    return (errno = EINVAL, -1);
  }
  int ftruncate(int, off_t) override { return (errno = EOPNOTSUPP, -1); }
};

/// One tensor as one rank has it.
struct Held {
  std::vector<std::byte> memory;
  TensorView view;

  Held(const std::string& name, DType dtype, const Region& region)
      : memory(static_cast<size_t>(region.size() * dtype_bits(dtype) / 8)), view{name, dtype, region, nullptr} {
    view.data = memory.data();
  }
};

struct Spec {
  std::string name;
  DType dtype;
  Shape shape;
};

inline const std::vector<Spec> kSpecs = {{"blocks.0.weight", DType::kF32, {37, 11}},
                                         {"blocks.0.bias", DType::kF32, {37}},
                                         {"half", DType::kBF16, {8, 5, 3}},
                                         {"scalar", DType::kF64, {}},
                                         {"none", DType::kF32, {0, 4}},
                                         {"counts", DType::kI64, {13}},
                                         {"flags", DType::kBool, {7}},
                                         {"tiny", DType::kF8E4M3, {5, 3}},
                                         {"large", DType::kF32, {700, 1000}},
                                         {"one row", DType::kF32, {1, 9}}};

/// How `ranks` ranks share a tensor.
using Sharding = std::function<Region(const Shape&, int rank, int ranks)>;

/// Near-equal pieces of one dimension, the last ones smaller or empty, as torch cuts them.
inline Region cut(const Shape& shape, size_t dim, int rank, int ranks) {
  std::vector<std::vector<Interval>> dims;
  for (const int64_t size : shape) dims.push_back({{0, size}});
  const int64_t size = shape[dim], each = (size + ranks - 1) / ranks, begin = std::min(each * rank, size);
  dims[dim] = {{begin, std::min(begin + each, size)}};
  return Region::grid(shape, dims);
}
inline Region rows(const Shape& shape, int rank, int ranks) {
  return shape.empty() || shape[0] == 0 ? Region::whole(shape) : cut(shape, 0, rank, ranks);
}
inline Region columns(const Shape& shape, int rank, int ranks) {
  return shape.size() < 2 ? rows(shape, rank, ranks) : cut(shape, 1, rank, ranks);
}
inline Region flat(const Shape& shape, int rank, int ranks) {
  return Region::whole(shape).part(rank, ranks, 1);
}
inline Region whole(const Shape& shape, int, int) {
  return Region::whole(shape);
}

inline int version = 0;  ///< of all values

/// Writes a tensor's bytes from its global byte `begin` on, which depend on place, name and version.
inline void fill(const Spec& spec, int64_t begin, std::span<std::byte> bytes) {
  static const std::vector<std::byte> pattern = [] {
    std::vector<std::byte> period;
    for (int64_t at = 0; at < 251 * 127; ++at) period.push_back(static_cast<std::byte>((at * 31 + at / 251) % 127));
    return period;
  }();
  if (spec.dtype == DType::kBool) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(begin++ % 2);
    return;
  }
  size_t at = static_cast<size_t>(begin) + spec.name.size() * 7 + static_cast<size_t>(version);
  while (!bytes.empty()) {
    const auto rest = std::span(pattern).subspan(at % pattern.size());
    const size_t count = std::min(rest.size(), bytes.size());
    std::copy_n(rest.begin(), count, bytes.begin());
    bytes = bytes.subspan(count);
    at += count;
  }
}

inline std::vector<Held> hold(const Sharding& sharding, int rank, int ranks, bool filled,
                              const std::vector<Spec>& specs = kSpecs) {
  std::vector<Held> held;
  for (const Spec& spec : specs) {
    Held& one = held.emplace_back(spec.name, spec.dtype, sharding(spec.shape, rank, ranks));
    const int64_t size = dtype_bits(spec.dtype) / 8;
    if (!filled) continue;
    one.view.region.for_each_run([&](const Run& run) {
      fill(spec, run.global_begin * size,
           std::span(one.memory)
               .subspan(static_cast<size_t>(run.local_begin * size), static_cast<size_t>(run.length * size)));
    });
  }
  return held;
}

inline std::vector<TensorView> views_of(std::vector<Held>& held, const Device& device = {}) {
  std::vector<TensorView> views;
  for (Held& one : held) {
    one.view.device = device;
    one.view.data = one.memory.data();
    views.push_back(one.view);
  }
  return views;
}

/// Runs fn(group) on `ranks` threads; the code with which each ended, kInternal + 1 for none.
constexpr int kFine = -1;
inline std::vector<int> on_ranks(int ranks, const std::function<void(Group&)>& fn, base::Syscalls* machine = nullptr) {
  auto groups = threads(ranks);
  std::vector<int> codes(static_cast<size_t>(ranks), kFine);
  std::vector<std::thread> running;
  for (int rank = 0; rank < ranks; ++rank) {
    running.emplace_back([&, rank] {
      const base::CallsTo here(machine);
      try {
        fn(*groups[static_cast<size_t>(rank)]);
      } catch (const Error& error) {
        codes[static_cast<size_t>(rank)] = static_cast<int>(error.code());
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  return codes;
}

inline std::vector<int> all(int ranks, int code) {
  return std::vector<int>(static_cast<size_t>(ranks), code);
}

class Checkpoints : public InFolder {
 protected:
  /// Puts the folder into memory where there is some, for tests with thousands of flushes.
  void move_to_memory() {
    fs::remove_all(folder_);
    if (fs::is_directory("/dev/shm")) folder_ = fs::path("/dev/shm") / folder_.filename();
    fs::create_directories(folder_);
  }

  /// On machine_.
  std::vector<int> on_ranks(int ranks, const std::function<void(Group&)>& fn) const {
    return shardow::on_ranks(ranks, fn, machine_);
  }

  std::vector<int> save_as(const fs::path& path, const Sharding& sharding, int ranks, const SaveOptions& options = {}) {
    return on_ranks(ranks, [&](Group& group) {
      auto held = hold(sharding, group.rank(), ranks, true, specs_);
      save(group, views_of(held, device_), path, options);
    });
  }

  std::vector<int> load_as(const fs::path& path, const Sharding& sharding, int ranks, bool compare = true) {
    return on_ranks(ranks, [&](Group& group) {
      auto held = hold(sharding, group.rank(), ranks, false, specs_);
      load(group, views_of(held, device_), path);
      if (!compare) return;
      auto expected = hold(sharding, group.rank(), ranks, true, specs_);
      for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
    });
  }

  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_)) found.insert(entry.path().filename().string());
    return found;
  }

  base::Syscalls* machine_ = nullptr;  ///< of all ranks; null: the machine's own
  Device device_;                      ///< of all tensors, whose memory is the host's
  std::vector<Spec> specs_ = kSpecs;   ///< of what is saved and loaded
};

inline const std::vector<std::pair<const char*, Sharding>> kShardings = {
    {"rows", rows}, {"columns", columns}, {"flat", flat}, {"whole", whole}};

}  // namespace shardow
