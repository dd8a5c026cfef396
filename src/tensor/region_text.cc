// A region as text for people and as bytes for other ranks.
//
//   bytes    := version ndim dim* begin end           all numbers LEB128 (7 bits a byte, low first), version = 1
//   dim      := size num_intervals (gap length)*      gap: from the end of the last interval, or from 0
//
// There is one encoding of each grid and window: decode() makes the region, encodes it again and refuses what differs,
// which covers overlong numbers, touching intervals and trailing bytes without a rule for each.
#include <fmt/format.h>

#include "base/checked.h"
#include "base/leb128.h"
#include "shardow/region.h"
#include "tensor/grid.h"

namespace shardow {
namespace {

using base::fail;

constexpr int64_t kVersion = 1;
constexpr size_t kMostIntervalsShown = 4;

void put(std::string& out, int64_t number) {
  base::put_number(out, static_cast<uint64_t>(number));
}

int64_t get(base::NumberReader& reader) {
  const auto number = static_cast<int64_t>(reader.next());
  if (number < 0) fail(Code::kCorrupt, "an encoded region has a number above 2^63");
  return number;
}

std::vector<Interval> get_intervals(base::NumberReader& reader) {
  const int64_t count = get(reader);
  if (static_cast<uint64_t>(count) > reader.left() / 2)
    fail(Code::kCorrupt, "an encoded region says {} intervals in {} bytes", count, reader.left());
  std::vector<Interval> intervals;
  int64_t reached = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = base::checked_add(reached, get(reader));
    reached = base::checked_add(begin, get(reader));
    intervals.push_back({begin, reached});
  }
  return intervals;
}

std::string text_of(const std::vector<Interval>& intervals) {
  std::string text;
  for (size_t i = 0; i < intervals.size() && i < kMostIntervalsShown; ++i) {
    text += fmt::format("{}{}:{}", i == 0 ? "" : " + ", intervals[i].begin, intervals[i].end);
  }
  if (intervals.size() > kMostIntervalsShown) text += fmt::format(" + ... ({} intervals)", intervals.size());
  return intervals.empty() ? "none" : text;
}

}  // namespace

std::string Region::to_string() const {
  std::string text = fmt::format("[{}]", fmt::join(shape(), ", "));
  bool whole = true;
  std::vector<std::string> dims;
  for (size_t d = 0; d < shape().size(); ++d) {
    whole = whole && grid_->counts[d] == shape()[d];
    dims.push_back(text_of(grid_->dims[d]));
  }
  if (!whole) text += fmt::format(" at [{}]", fmt::join(dims, ", "));
  if (size() != grid_->elements) text += fmt::format(", elements {}:{}", begin_, end_);
  return text;
}

std::string Region::encode() const {
  std::string out;
  put(out, kVersion);
  put(out, static_cast<int64_t>(shape().size()));
  for (size_t d = 0; d < shape().size(); ++d) {
    put(out, shape()[d]);
    put(out, static_cast<int64_t>(grid_->dims[d].size()));
    int64_t reached = 0;
    for (const auto& [begin, end] : grid_->dims[d]) {
      put(out, begin - reached);
      put(out, end - begin);
      reached = end;
    }
  }
  put(out, begin_);
  put(out, end_);
  return out;
}

Region Region::decode(std::string_view bytes) {
  base::NumberReader reader(bytes, "an encoded region");
  if (const int64_t version = get(reader); version != kVersion)
    fail(Code::kCorrupt, "an encoded region of version {}; this build reads {}", version, kVersion);
  const int64_t ndim = get(reader);
  if (ndim > kMaxDims)
    fail(Code::kCorrupt, "an encoded region of {} dimensions; at most {} are supported", ndim, kMaxDims);
  try {
    Shape shape;
    std::vector<std::vector<Interval>> dims;
    for (int64_t d = 0; d < ndim; ++d) {
      shape.push_back(get(reader));
      dims.push_back(get_intervals(reader));
    }
    Region region = grid(std::move(shape), std::move(dims));
    const int64_t begin = get(reader), end = get(reader);
    region = region.window(begin, end);
    if (region.encode() != bytes)
      fail(Code::kCorrupt, "an encoded region of {} bytes is not in its one valid form", bytes.size());
    return region;
  } catch (const Error& error) {
    if (error.code() == Code::kCorrupt) throw;
    fail(Code::kCorrupt, "an encoded region contradicts itself: {}", error.what());
  }
}

}  // namespace shardow
