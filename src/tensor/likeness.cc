#include "tensor/likeness.h"

#include <cstdint>
#include <cstring>

namespace shardow {
namespace {

constexpr size_t kAhead = 6;  // views whose memory is fetched while those before them are compared

/// memcmp() == 0 without a call: names have a few dozen bytes.
bool equal_bytes(const char* a, const char* b, size_t count) noexcept {
  const auto word = [](const char* at) {
    uint64_t bits = 0;
    std::memcpy(&bits, at, sizeof bits);
    return bits;
  };
  if (count < sizeof(uint64_t)) return std::memcmp(a, b, count) == 0;
  uint64_t differing = word(a + count - 8) ^ word(b + count - 8);
  for (size_t i = 0; i + 8 < count; i += 8) differing |= word(a + i) ^ word(b + i);
  return differing == 0;
}

}  // namespace

Likeness::Likeness(std::span<const TensorView> views) {
  size_t bytes = 0;
  for (const TensorView& view : views) bytes += view.name.size();
  names_.reserve(bytes);
  rows_.reserve(views.size());
  keys_.reserve(views.size());
  for (const TensorView& view : views) {
    const GridKey& key = RunCursor::key_of(view.region);
    rows_.push_back({view.data, &key, RunCursor::window_of(view.region), view.region.size(), view.name.size(),
                     view.device.index, view.device.kind, view.dtype});
    keys_.push_back(key);
    names_ += view.name;
    on_host_ = on_host_ && view.device.kind == Device::Kind::kCpu;
  }
}

bool Likeness::holds(std::span<const TensorView> views) const noexcept {
  if (views.size() != rows_.size()) return false;
  const char* name = names_.data();
  for (size_t i = 0; i < views.size(); ++i) {
    if (i + kAhead < views.size()) {
      const TensorView& next = views[i + kAhead];
      __builtin_prefetch(next.name.data());
      __builtin_prefetch(&RunCursor::key_of(next.region));
    }
    const TensorView& view = views[i];
    const Row& row = rows_[i];
    if (view.data != row.data || view.dtype != row.dtype || view.device.kind != row.kind ||
        view.device.index != row.device)
      return false;
    if (RunCursor::window_of(view.region) != row.window || view.region.size() != row.size) return false;
    if (view.name.size() != row.name || !equal_bytes(view.name.data(), name, row.name)) return false;
    const GridKey& key = RunCursor::key_of(view.region);
    if (&key != row.made && !(key == keys_[i])) return false;
    name += row.name;
  }
  return true;
}

}  // namespace shardow
