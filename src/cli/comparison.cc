#include "cli/comparison.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "base/errors.h"
#include "base/mapped.h"
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

/// Elements [begin, end) of a pair: what is read in one go, a read's bytes of the wider dtype.
struct Stretch {
  Pair* pair;
  int64_t begin, end;

  int64_t bytes() const {
    return file::bytes_of(end - begin, pair->a->entry) + file::bytes_of(end - begin, pair->b->entry);
  }
};

std::vector<Stretch> stretches_of(Comparison& comparison) {
  std::vector<Stretch> stretches;
  for (Pair& pair : comparison.pairs) {
    if (!pair.read) continue;
    const int64_t most =
        kReadBytes * 8 / 64 * (64 / std::max({8, dtype_bits(pair.a->entry.dtype), dtype_bits(pair.b->entry.dtype)}));
    const int64_t size = Region::whole(pair.a->entry.shape).size();
    for (int64_t begin = 0; begin < size; begin += most)
      stretches.push_back({&pair, begin, std::min(begin + most, size)});
  }
  // As they lie in A's files, so that disks are read from front to end.
  std::stable_sort(stretches.begin(), stretches.end(), [](const Stretch& x, const Stretch& y) {
    const auto where = [](const Stretch& one) {
      return std::tuple(one.pair->a->file, one.pair->a->entry.begin, one.begin);
    };
    return where(x) < where(y);
  });
  return stretches;
}

/// Bytes of a tensor, read into `memory`.
std::span<const std::byte> read_part(const file::Catalog& catalog, const file::Stored& stored, int64_t begin,
                                     int64_t bytes, std::vector<std::byte>& memory) {
  const auto& source = catalog.files[stored.file];
  if (const auto wanted = static_cast<size_t>(bytes); memory.size() < wanted) memory.resize(wanted);
  const auto room = std::span(memory).first(static_cast<size_t>(bytes));
  source.file->handle()->read(room, source.data_begin + stored.entry.begin + begin);
  return room;
}

/// The files that are read, each as memory.
class Files {
 public:
  Files(const Comparison& comparison, int lanes) : looks_(lanes <= kMostLooking) {
    for (const Pair& pair : comparison.pairs) {
      if (!pair.read) continue;
      add(pair.catalog_a->files[pair.a->file].file.get());
      add(pair.catalog_b->files[pair.b->file].file.get());
    }
  }

  const base::Mapped& of(const file::Catalog& catalog, const file::Stored& stored) const {
    return mapped_.at(catalog.files[stored.file].file.get());
  }

  void check_unchanged() const {
    for (const auto& [file, mapped] : mapped_) file->check_unchanged();
  }

 private:
  void add(file::Opened* file) {
    if (!mapped_.contains(file)) mapped_.emplace(file, looks_ ? base::Mapped(*file->handle()) : base::Mapped());
  }

  bool looks_;
  std::map<file::Opened*, base::Mapped> mapped_;
};

/// What a lane has for one side.
struct Room {
  std::vector<std::byte> memory;
  base::Forgetting forgetting;
};

/// Elements of one side of a pair, as long as this lives: where they are in memory they are looked at there.
class Side {
 public:
  Side(const Files& files, const file::Catalog& catalog, const file::Stored& stored, const Stretch& stretch, Room& room)
      : mapped_(files.of(catalog, stored)), forgetting_(room.forgetting) {
    const int64_t begin = file::bytes_of(stretch.begin, stored.entry),
                  bytes = file::bytes_of(stretch.end, stored.entry) - begin;
    looked_at_ = mapped_.look(catalog.files[stored.file].data_begin + stored.entry.begin + begin, bytes);
    const auto width = static_cast<uintptr_t>(std::max(1, dtype_bits(stored.entry.dtype) / 8));
    const bool aligned =
        reinterpret_cast<uintptr_t>(looked_at_.data()) % width == 0;  // of headers by others some are not
    bytes_ = looked_at_.empty() || !aligned ? read_part(catalog, stored, begin, bytes, room.memory) : looked_at_;
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  ~Side() { forgetting_.forget(mapped_, looked_at_); }

  const std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }

 private:
  const base::Mapped& mapped_;
  base::Forgetting& forgetting_;
  std::span<const std::byte> looked_at_, bytes_;
};

struct Lane {
  Room a, b;
  std::vector<double> scratch = std::vector<double>(kScratch);
};

bool can_be_equal(const Pair& pair) {
  return pair.a->entry.dtype == pair.b->entry.dtype;
}

/// Of bytes that are equal: all that is known of them without their numbers.
Deviation of_equal(const Stretch& stretch) {
  Deviation none;
  const DType dtype = stretch.pair->a->entry.dtype;
  none.elements = has_values(dtype) ? (stretch.end - stretch.begin) * (dtype == DType::kC64 ? 2 : 1) : 0;
  return none;
}

/// Of bytes that differ.
Deviation of_differing(const Stretch& stretch, const Side& a, const Side& b, Lane& lane) {
  const DType dtype_a = stretch.pair->a->entry.dtype, dtype_b = stretch.pair->b->entry.dtype;
  if (has_values(dtype_a))
    return deviation(a.data(), dtype_a, b.data(), dtype_b, stretch.end - stretch.begin, lane.scratch);
  Deviation bytes_alone;
  bytes_alone.equal_bytes = false;
  return bytes_alone;
}

Squares squares_of(const Stretch& stretch, const Side& side, Lane& lane) {
  const DType dtype = stretch.pair->a->entry.dtype;
  return deviation(side.data(), dtype, side.data(), dtype, stretch.end - stretch.begin, lane.scratch).squares_a;
}

/// Adds up parts in their order, whatever order they come in.
class InOrder {
 public:
  explicit InOrder(const std::vector<Stretch>& stretches) : stretches_(stretches) {}

  void add(int64_t number, const Deviation& part) {
    const base::Lock lock(mutex_);
    waiting_.emplace(number, part);
    for (auto first = waiting_.begin(); first != waiting_.end() && first->first == next_;
         first = waiting_.erase(first), ++next_)
      stretches_[static_cast<size_t>(next_)].pair->deviation += first->second;
  }

 private:
  const std::vector<Stretch>& stretches_;
  base::Mutex mutex_;
  std::map<int64_t, Deviation> waiting_ SHARDOW_GUARDED_BY(mutex_);
  int64_t next_ SHARDOW_GUARDED_BY(mutex_) = 0;
};

/// Most stretches are equal or all of them differ: of equal ones the squares are summed up once it is known that their
/// tensor differs elsewhere, which |a - b| / |a| asks for. What was passed by then is read again, on one side.
class Values {
 public:
  Values(Comparison& comparison, int lanes)
      : pairs_(comparison.pairs.data()),
        stretches_(stretches_of(comparison)),
        files_(comparison, lanes),
        memory_(static_cast<size_t>(lanes)),
        equal_(stretches_.size()),
        differs_(comparison.pairs.size()) {}

  void compare(int lanes, const std::function<void(int64_t done, int64_t total)>& told) {
    for (const Stretch& stretch : stretches_) total_ += stretch.bytes();
    InOrder sums(stretches_);
    const auto count = static_cast<int64_t>(stretches_.size());
    const auto look = [&](int64_t group, int lane) {
      for (int64_t n = kTogether * group; n < std::min(count, kTogether * (group + 1)); ++n)
        sums.add(n, look_at(static_cast<size_t>(n), memory_[static_cast<size_t>(lane)]));
    };
    const auto tell = [&] { told(done_, total_); };
    in_lanes((count + kTogether - 1) / kTogether, lanes, look, tell);
    const std::vector<size_t> left = left_out();
    const auto sum_up = [&](int64_t i, int lane) {
      const size_t number = left[static_cast<size_t>(i)];
      Lane& own = memory_[static_cast<size_t>(lane)];
      const Pair& pair = *stretches_[number].pair;
      equal_[number].squares =
          squares_of(stretches_[number], Side(files_, *pair.catalog_a, *pair.a, stretches_[number], own.a), own);
    };
    in_lanes(static_cast<int64_t>(left.size()), lanes, sum_up, tell);
    for (size_t number = 0; number < stretches_.size(); ++number) {
      if (counts(number)) stretches_[number].pair->deviation.squares_a += equal_[number].squares;
    }
    files_.check_unchanged();
  }

 private:
  static constexpr int64_t kTogether = 4;  // stretches that a lane takes at once: neighbours are forgotten in one call

  struct Equal {
    bool equal = false, summed = false;
    Squares squares = {};
  };

  Deviation look_at(size_t number, Lane& lane) {
    const Stretch& stretch = stretches_[number];
    const Pair& pair = *stretch.pair;
    const Side a(files_, *pair.catalog_a, *pair.a, stretch, lane.a),
        b(files_, *pair.catalog_b, *pair.b, stretch, lane.b);
    std::atomic<bool>& differs = differs_[static_cast<size_t>(stretch.pair - pairs_)];
    done_ += stretch.bytes();
    if (!can_be_equal(pair) || std::memcmp(a.data(), b.data(), a.size()) != 0) {
      differs = true;
      return of_differing(stretch, a, b, lane);
    }
    equal_[number].equal = true;
    equal_[number].summed = differs && has_values(pair.a->entry.dtype);
    if (equal_[number].summed) equal_[number].squares = squares_of(stretch, a, lane);
    return of_equal(stretch);
  }

  /// Whether the squares of an equal stretch bear on what is said.
  bool counts(size_t number) const {
    return equal_[number].equal && !stretches_[number].pair->deviation.squares.zero();
  }

  std::vector<size_t> left_out() const {
    std::vector<size_t> left;
    for (size_t number = 0; number < stretches_.size(); ++number) {
      if (counts(number) && !equal_[number].summed) left.push_back(number);
    }
    return left;
  }

  const Pair* pairs_;
  std::vector<Stretch> stretches_;
  Files files_;
  std::vector<Lane> memory_;
  std::vector<Equal> equal_;                // by stretch
  std::vector<std::atomic<bool>> differs_;  // by pair: known by now
  int64_t total_ = 0;
  std::atomic<int64_t> done_{0};
};

}  // namespace

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
  Values(comparison, lanes).compare(lanes, told);
}

}  // namespace shardow::cli
