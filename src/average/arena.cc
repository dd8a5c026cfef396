#include "average/arena.h"

namespace shardow::average {
namespace {

constexpr int64_t kPeriod = int64_t{64} << 20;
constexpr int64_t kCached = int64_t{1} << 20;  // bytes: smaller averages stay in caches, where none of this was seen
constexpr int64_t kAlignment = 64;

}  // namespace

int64_t arena_stride(int64_t bytes, int num_averages) {
  if (num_averages < 2 || bytes < kCached) return bytes;
  const int64_t apart = kPeriod / num_averages / kAlignment * kAlignment;
  return bytes + ((apart - bytes) % kPeriod + kPeriod) % kPeriod;
}

}  // namespace shardow::average
