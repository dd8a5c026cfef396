#include "cli/comparison.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "base/errors.h"
#include "cli/lanes.h"
#include "cli/numbers.h"
#include "file/layout.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

struct Place {
  const file::Catalog* catalog;
  const file::Stored* stored;
};

/// Whether tensors of several of them have one name, so that files have to be told apart.
bool are_ambiguous(const std::vector<Source>& sources) {
  std::set<std::string_view> names;
  size_t count = 0;
  for (const Source& source : sources) {
    for (const file::Stored& one : file::Inside::of(source.checkpoint).tensors) names.insert(one.entry.name);
    count += file::Inside::of(source.checkpoint).tensors.size();
  }
  return names.size() < count;
}

std::map<std::string, Place> places(const std::vector<Source>& sources, bool with_labels) {
  std::map<std::string, Place> all;
  for (const Source& source : sources) {
    for (const file::Stored& one : file::Inside::of(source.checkpoint).tensors)
      all.emplace(with_labels ? full_name(source, one.entry.name) : one.entry.name,
                  Place{&file::Inside::of(source.checkpoint), &one});
  }
  return all;
}

bool has_a_model(const std::vector<Source>& sources) {
  return std::any_of(sources.begin(), sources.end(), [](const Source& one) { return one.label.empty(); });
}

/// A model in one of them has the plain names; without, tensors of files beside one another cannot be told from the
/// other side's.
void check_one_is_meant(const std::vector<Source>& sources) {
  if (has_a_model(sources)) return;
  std::vector<std::string> labels;
  labels.reserve(sources.size());
  for (const Source& source : sources) labels.push_back(source.label);
  base::fail(Code::kInvalidArgument, "{} has {} files with the same names of tensors in them, {}; name one of them",
             sources[0].checkpoint.files()[0].path.parent_path().string(), labels.size(), fmt::join(labels, ", "));
}

bool can_read(const file::Entry& a, const file::Entry& b) {
  if (a.shape != b.shape) return false;
  return a.dtype == b.dtype ||
         (has_values(a.dtype) && has_values(b.dtype) && a.dtype != DType::kC64 && b.dtype != DType::kC64);
}

void add_number(Deviation& sums, long double a, long double b) noexcept {
  if (std::isfinite(a)) sums.squares_a += a * a;
  if (a == b || (std::isnan(a) && std::isnan(b))) return;
  ++sums.differing;
  const long double apart = std::fabs(a - b);
  if (const auto rounded = static_cast<double>(apart); std::isfinite(rounded)) {
    sums.most = std::max(sums.most, rounded);
    sums.squares += apart * apart;
  } else {
    ++sums.not_finite;
  }
}

/// What one thread has of a pair: a chunk of each side.
struct Chunks {
  Pair& pair;
  std::vector<std::byte> a = {}, b = {};

  /// Calls work(count) for one chunk after the other, until it returns false.
  template <class Work>
  void for_each(const Work& work) {
    const int64_t size = Region::whole(pair.a->entry.shape).size();
    for (int64_t begin = 0; begin < size; begin += kMostElements) {
      check_interrupted();
      const int64_t end = std::min(begin + kMostElements, size);
      read_elements(*pair.catalog_a, *pair.a, begin, end, a);
      read_elements(*pair.catalog_b, *pair.b, begin, end, b);
      if (!work(end - begin)) return;
    }
  }

  void add_numbers(int64_t count) {
    const DType dtype_a = pair.a->entry.dtype, dtype_b = pair.b->entry.dtype;
    const int64_t parts = dtype_a == DType::kC64 ? 2 : 1;
    std::array<long double, kMostNumbers> x, y;
    for (int64_t begin = 0; begin < count; begin += kMostNumbers / parts) {
      const int64_t size = std::min(kMostNumbers / parts, count - begin);
      to_numbers(a.data() + begin * dtype_bits(dtype_a) / 8, dtype_a, x.data(), size);
      to_numbers(b.data() + begin * dtype_bits(dtype_b) / 8, dtype_b, y.data(), size);
      for (size_t i = 0; i < static_cast<size_t>(size * parts); ++i) add_number(pair.deviation, x[i], y[i]);
    }
  }
};

/// Compares bytes up to the first difference, then all numbers from the beginning where there is one. Calls told() with
/// the bytes that are done.
template <class Told>
void compare_pair(Pair& pair, const Told& told) {
  const file::Entry &a = pair.a->entry, &b = pair.b->entry;
  Chunks chunks{pair};
  int64_t done = 0, passed = 0;
  const auto advance = [&](int64_t count) {
    passed += count;
    if (passed <= done) return;
    told(file::bytes_of(passed - done, a) + file::bytes_of(passed - done, b));
    done = passed;
  };
  bool& equal = pair.deviation.equal_bytes;
  equal = a.dtype == b.dtype;
  chunks.for_each([&](int64_t count) {
    equal = equal && chunks.a == chunks.b;
    if (equal) advance(count);
    return equal;
  });
  const int64_t size = Region::whole(a.shape).size();
  if (has_values(a.dtype)) pair.deviation.elements = a.dtype == DType::kC64 ? 2 * size : size;
  passed = 0;
  if (!equal && has_values(a.dtype)) {
    chunks.for_each([&](int64_t count) {
      chunks.add_numbers(count);
      advance(count);
      return true;
    });
  }
  pair.catalog_a->files[pair.a->file].file->check_unchanged();
  pair.catalog_b->files[pair.b->file].file->check_unchanged();
}

}  // namespace

double Deviation::rms() const noexcept {
  const int64_t counted = elements - not_finite;
  return counted == 0 ? 0 : static_cast<double>(std::sqrt(squares / static_cast<long double>(counted)));
}

double Deviation::relative() const noexcept {
  if (squares == 0) return 0;
  return static_cast<double>(std::sqrt(squares / squares_a));  // infinite where a is 0
}

bool Comparison::differs() const noexcept {
  return !only_a.empty() || !only_b.empty() ||
         std::any_of(pairs.begin(), pairs.end(), [](const Pair& pair) { return pair.differs(); });
}

Comparison compare_names(const std::vector<Source>& a, const std::vector<Source>& b) {
  const bool unsure_a = are_ambiguous(a), unsure_b = are_ambiguous(b);
  if (unsure_a != unsure_b) check_one_is_meant(unsure_a ? a : b);
  const bool both = (unsure_a || unsure_b) && has_a_model(a) &&
                    has_a_model(b);  // what lies beside their models has its file's name, too
  const std::map<std::string, Place> in_a = places(a, unsure_a || both), in_b = places(b, unsure_b || both);
  Comparison found;
  for (const auto& [name, place] : in_a) {
    const auto other = in_b.find(name);
    if (other == in_b.end()) {
      found.only_a.push_back(name);
      continue;
    }
    const bool read = can_read(place.stored->entry, other->second.stored->entry);
    found.pairs.push_back({name, place.catalog, other->second.catalog, place.stored, other->second.stored, read});
  }
  for (const auto& [name, place] : in_b) {
    if (!in_a.contains(name)) found.only_b.push_back(name);
  }
  return found;
}

void compare_values(Comparison& comparison, int lanes, const std::function<void(int64_t done, int64_t total)>& told) {
  std::vector<Pair*> pairs;
  int64_t total = 0;
  for (Pair& pair : comparison.pairs) {
    if (!pair.read) continue;
    pairs.push_back(&pair);
    total += pair.a->entry.end - pair.a->entry.begin + pair.b->entry.end - pair.b->entry.begin;
  }
  std::atomic<int64_t> done{0};
  const auto work = [&](int64_t number, int lane) {
    compare_pair(*pairs[static_cast<size_t>(number)], [&](int64_t bytes) {
      done += bytes;
      if (lane == 0) told(done, total);
    });
  };
  in_lanes(static_cast<int64_t>(pairs.size()), lanes, work);
}

}  // namespace shardow::cli
