// Memory that runs out: each allocation of a save, and of a load, is refused once, on whatever thread it is.
#include <chrono>
#include <cstdio>
#include <iterator>

#include "base/allocations_fixture.h"
#include "file/checkpoint_fixture.h"
#include "file/names.h"

namespace shardow {
namespace {

struct Ended {
  bool well;     ///< else without memory; anything else fails the test
  bool reached;  ///< the allocation that was to be refused
};

/// How fn() ends where its `k`-th allocation is refused.
template <class Fn>
Ended ended(long k, const Fn& fn) {
  bool well = true;
  std::string other;
  base::allocations_until_refusal.store(k);
  try {
    fn();
  } catch (const std::bad_alloc&) {
    well = false;
  } catch (const Error& error) {
    well = false;
    if (error.code() != Code::kOutOfMemory) other = error.what();
  }
  const bool reached = base::allocations_until_refusal.exchange(-1) < 0;
  EXPECT_EQ(other, "") << "allocation " << k;
  return {well, reached};
}

long descriptors() {
  return static_cast<long>(std::distance(fs::directory_iterator("/proc/self/fd"), {}));
}

/// Calls refused(k) for each allocation that there is, or every third; returns how many of them ended it.
long every_allocation(const std::function<Ended(long)>& refused) {
  long failed = 0;
  const long before = descriptors();
  for (long k = 0;; k += kSlow ? 7 : kAll ? 1 : 3) {
    const Ended one = refused(k);
    EXPECT_EQ(descriptors(), before) << "allocation " << k;
    if (!one.reached || testing::Test::HasFailure()) return failed;
    failed += one.well ? 0 : 1;
  }
}

class NoMemory : public Checkpoints {
 protected:
  NoMemory() { move_to_memory(); }

  std::vector<Held> held(float value) const {
    std::vector<Held> all;
    for (const char* const name : {"a", "b"}) {
      Held& one = all.emplace_back(name, DType::kF32, Region::whole({20, 3}));
      for (size_t i = 0; i < 60; ++i) std::memcpy(one.memory.data() + 4 * i, &value, 4);
    }
    return all;
  }

  void save_value(float value, const fs::path& path) const {
    auto all = held(value);
    const auto views = views_of(all);
    save(*solo(), views, path, options_);
  }

  /// -1 where it is neither.
  float value_at(const fs::path& path) const {
    auto all = held(-1);
    load(*solo(), views_of(all), path);
    float value = 0;
    std::memcpy(&value, all[0].memory.data(), 4);
    const auto expected = held(value);
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].memory != expected[i].memory) return -1;
    }
    return value;
  }

  SaveOptions options_;
};

TEST_F(NoMemory, EndsASaveWithTheOldCheckpointOrTheNewOneAndTheNextOneWorks) {
  for (const char* const name : {"a.safetensors", "model"}) {
    SCOPED_TRACE(name);
    const auto path = folder_ / name;
    options_ = {};
    if (path.extension().empty()) options_.max_shard_size = 300;
    options_.timeout = std::chrono::milliseconds(60'000);
    save_value(1, path);
    float last = 1;
    const long failed = every_allocation([&](long k) {
      const float next = static_cast<float>(k + 2);
      const Ended how = ended(k, [&] { save_value(next, path); });
      const float found = value_at(path);
      EXPECT_TRUE(found == next || (!how.well && found == last)) << "allocation " << k << ": " << found;
      if (!how.well) {
        save_value(next, path);
        EXPECT_EQ(value_at(path), next) << "after allocation " << k;
        EXPECT_EQ(names(), std::set<std::string>{name}) << "after allocation " << k;
      }
      last = next;
      return how;
    });
    std::printf("%s: %ld refused allocations ended a save\n", name, failed);
    EXPECT_GT(failed, 0);
    fs::remove_all(path);
  }
}

TEST_F(NoMemory, EndsALoadAndTheNextOneWorks) {
  const auto path = folder_ / "model";
  options_.max_shard_size = 300;
  save_value(7, path);
  const long failed = every_allocation([&](long k) {
    auto all = held(0);
    const auto views = views_of(all);
    const Ended how = ended(k, [&] { load(*solo(), views, path); });
    EXPECT_TRUE(!how.well || all[1].memory == held(7)[1].memory) << "allocation " << k;
    EXPECT_EQ(value_at(path), 7);
    return how;
  });
  std::printf("%ld refused allocations ended a load\n", failed);
  EXPECT_GT(failed, 0);
}

}  // namespace
}  // namespace shardow
