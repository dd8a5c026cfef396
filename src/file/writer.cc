#include "file/writer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/errors.h"
#include "file/crc.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = int64_t{8} << 20;
constexpr std::chrono::milliseconds kPart{500};  // how long a rank writes before it tells the others

}  // namespace

Writer::Writer(std::span<const TensorView> views, std::vector<Owned> owned, Layout& layout, const Draft& draft, bool checksums,
               size_t tensors)
    : views_(views),
      owned_(std::move(owned)),
      layout_(layout),
      draft_(draft),
      checksums_(checksums),
      crcs_(tensors, 0),
      files_(layout.files().size()) {}

Part Writer::part() {
  const auto begin = Clock::now();
  const int64_t before = written_;
  while (next_ < owned_.size() || left_ > 0) {
    if (left_ == 0 && !next_run()) continue;
    if (left_ > 0) chunk();
    if (Clock::now() - begin > kPart) break;
  }
  return {written_ - before, next_ == owned_.size() && left_ == 0 && !runs_};
}

void Writer::finish() {
  for (auto& file : files_) {
    if (!file) continue;
    file->sync();
    file->close();
  }
}

/// Moves on to the next run, and to the next tensor after the last one. False if there was none here.
bool Writer::next_run() {
  if (!runs_) runs_ = std::make_unique<RunCursor>(owned_[next_].region);
  const auto run = runs_->next();
  if (!run) {
    runs_.reset();
    ++next_;
    return false;
  }
  const Owned& mine = owned_[next_];
  global_ = run->global_begin;
  local_ = mine.local_begin + run->local_begin;
  left_ = run->length;
  return true;
}

void Writer::chunk() {
  const Owned& mine = owned_[next_];
  const TensorView& view = views_[mine.view];
  const Place& place = layout_.place(mine.tensor);
  const int64_t bits = dtype_bits(place.entry.dtype);
  const int64_t count = std::min(left_, kChunkBytes * 8 / bits / 16 * 16);
  const int64_t begin = bytes_of(global_, place.entry), bytes = bytes_of(global_ + count, place.entry) - begin;
  const std::span<const std::byte> data(source(view, place.entry.dtype, count), static_cast<size_t>(bytes));
  file(place.file).write(data, layout_.files()[place.file].header.data_begin + place.entry.begin + begin);
  if (checksums_) crcs_[mine.tensor] ^= crc32_contribution(crc32(0, data), place.entry.end - place.entry.begin - begin - bytes);
  written_ += bytes;
  global_ += count;
  local_ += count;
  left_ -= count;
}

const std::byte* Writer::source(const TensorView& view, DType dtype, int64_t count) {
  const std::byte* data = static_cast<const std::byte*>(view.data) + local_ * dtype_bits(view.dtype) / 8;
  if (view.dtype == dtype) return data;
  buffer_.resize(static_cast<size_t>(kChunkBytes));
  kernels::cpu::cast(data, view.dtype, buffer_.data(), dtype, count);
  return buffer_.data();
}

base::File& Writer::file(size_t index) {
  auto& file = files_[index];
  if (!file) file = std::make_unique<base::File>(base::File::open_for_writing(draft_.file(layout_.files()[index].name)));
  return *file;
}

}  // namespace shardow::file
