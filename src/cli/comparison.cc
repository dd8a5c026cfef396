#include "cli/comparison.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "cli/lanes.h"
#include "file/catalog.h"
#include "file/layout.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

struct Place {
  const file::Catalog* catalog;
  const file::Stored* stored;
};

std::map<std::string, Place> places(const std::vector<Source>& sources) {
  std::map<std::string, Place> all;
  for (const Source& source : sources) {
    for (const auto& [name, stored] : source.checkpoint.catalog().tensors)
      all.emplace(full_name(source, name), Place{&source.checkpoint.catalog(), &stored});
  }
  return all;
}

bool can_read(const file::Entry& a, const file::Entry& b) {
  if (a.shape != b.shape) return false;
  return a.dtype == b.dtype || (has_values(a.dtype) && has_values(b.dtype) && a.dtype != DType::kC64 && b.dtype != DType::kC64);
}

/// Elements [begin, end) of a pair: what is read in one go, a read's bytes of the wider dtype.
struct Stretch {
  Pair* pair;
  int64_t begin, end;

  int64_t bytes() const { return file::bytes_of(end - begin, pair->a->entry) + file::bytes_of(end - begin, pair->b->entry); }
};

std::vector<Stretch> stretches_of(Comparison& comparison) {
  std::vector<Stretch> stretches;
  for (Pair& pair : comparison.pairs) {
    if (!pair.read) continue;
    const int64_t most = kReadBytes * 8 / 64 * (64 / std::max({8, dtype_bits(pair.a->entry.dtype), dtype_bits(pair.b->entry.dtype)}));
    const int64_t size = Region::whole(pair.a->entry.shape).size();
    for (int64_t begin = 0; begin < size; begin += most) stretches.push_back({&pair, begin, std::min(begin + most, size)});
  }
  // As they lie in A's files, so that disks are read from front to end.
  std::stable_sort(stretches.begin(), stretches.end(), [](const Stretch& x, const Stretch& y) {
    const auto where = [](const Stretch& one) { return std::tuple(one.pair->a->file, one.pair->a->entry.begin, one.begin); };
    return where(x) < where(y);
  });
  return stretches;
}

std::span<const std::byte> read(const file::Catalog& catalog, const file::Stored& stored, const Stretch& stretch,
                                std::vector<std::byte>& memory) {
  const auto& source = catalog.files[stored.file];
  const int64_t begin = file::bytes_of(stretch.begin, stored.entry), end = file::bytes_of(stretch.end, stored.entry);
  if (const auto bytes = static_cast<size_t>(end - begin); memory.size() < bytes) memory.resize(bytes);
  const auto bytes = std::span(memory).first(static_cast<size_t>(end - begin));
  source.file->handle()->read(bytes, source.data_begin + stored.entry.begin + begin);
  return bytes;
}

struct Lane {
  std::vector<std::byte> a, b;
  std::vector<double> scratch = std::vector<double>(kScratch);
};

Deviation compute(const Stretch& stretch, Lane& lane) {
  const Pair& pair = *stretch.pair;
  const auto a = read(*pair.catalog_a, *pair.a, stretch, lane.a), b = read(*pair.catalog_b, *pair.b, stretch, lane.b);
  const int64_t count = stretch.end - stretch.begin;
  const DType dtype_a = pair.a->entry.dtype, dtype_b = pair.b->entry.dtype;
  if (has_values(dtype_a)) return deviation(a.data(), dtype_a, b.data(), dtype_b, count, lane.scratch);
  Deviation bytes_alone;
  bytes_alone.equal_bytes = std::memcmp(a.data(), b.data(), a.size()) == 0;
  return bytes_alone;
}

/// Adds up parts in their order, whatever order they come in.
class InOrder {
 public:
  explicit InOrder(const std::vector<Stretch>& stretches) : stretches_(stretches) {}

  void add(int64_t number, const Deviation& part) {
    const base::Lock lock(mutex_);
    waiting_.emplace(number, part);
    for (auto first = waiting_.begin(); first != waiting_.end() && first->first == next_; first = waiting_.erase(first), ++next_)
      stretches_[static_cast<size_t>(next_)].pair->deviation += first->second;
  }

 private:
  const std::vector<Stretch>& stretches_;
  base::Mutex mutex_;
  std::map<int64_t, Deviation> waiting_ SHARDOW_GUARDED_BY(mutex_);
  int64_t next_ SHARDOW_GUARDED_BY(mutex_) = 0;
};

void check_unchanged(const Comparison& comparison) {
  std::set<file::Opened*> files;
  for (const Pair& pair : comparison.pairs) {
    if (!pair.read) continue;
    files.insert(pair.catalog_a->files[pair.a->file].file.get());
    files.insert(pair.catalog_b->files[pair.b->file].file.get());
  }
  for (file::Opened* file : files) file->check_unchanged();
}

}  // namespace

bool Comparison::differs() const noexcept {
  return !only_a.empty() || !only_b.empty() || std::any_of(pairs.begin(), pairs.end(), [](const Pair& pair) { return pair.differs(); });
}

Comparison compare_names(const std::vector<Source>& a, const std::vector<Source>& b) {
  const std::map<std::string, Place> in_a = places(a), in_b = places(b);
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
  const std::vector<Stretch> stretches = stretches_of(comparison);
  int64_t total = 0;
  for (const Stretch& stretch : stretches) total += stretch.bytes();
  std::atomic<int64_t> done{0};
  std::vector<Lane> memory(static_cast<size_t>(lanes));
  InOrder sums(stretches);
  const auto work = [&](int64_t number, int lane) {
    const Stretch& stretch = stretches[static_cast<size_t>(number)];
    sums.add(number, compute(stretch, memory[static_cast<size_t>(lane)]));
    done += stretch.bytes();
  };
  in_lanes(static_cast<int64_t>(stretches.size()), lanes, work, [&] { told(done, total); });
  check_unchanged(comparison);
}

}  // namespace shardow::cli
