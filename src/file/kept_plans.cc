// A few plans are kept for each rank of each size of a group. That the inputs are the same is seen by comparing them
// one by one, which allocates nothing: views that are made once have the very regions that they had. Ranks that are
// threads of one process have one arrangement.
#include "file/kept_plans.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "file/ownership.h"

namespace shardow::file {
namespace {

constexpr size_t kMostPlans = 8;            // of a rank
constexpr size_t kMostTensors = 4'000'000;  // of all: what a rank holds, and what an arrangement has

/// What a plan follows from, but for other ranks.
struct Request {
  int rank, size;
  std::optional<DType> dtype;
  int64_t max_shard_size;
  bool checksums;
  std::vector<std::string> names;              // of files
  std::vector<std::vector<TensorView>> views;  // without memory

  Request(const Group& group, std::span<const SaveFile> files, const SaveOptions& options)
      : rank(group.rank()),
        size(group.size()),
        dtype(options.dtype),
        max_shard_size(options.max_shard_size),
        checksums(options.checksums) {
    for (const SaveFile& file : files) {
      names.push_back(file.name);
      auto& mine = views.emplace_back();
      mine.reserve(file.tensors.size());
      for (const TensorView& view : file.tensors) mine.push_back({view.name, view.dtype, view.region, nullptr});
    }
  }

  bool is_alike(const SaveOptions& options) const {
    return std::tie(dtype, max_shard_size, checksums) ==
           std::tie(options.dtype, options.max_shard_size, options.checksums);
  }

  bool is(const Group& group, std::span<const SaveFile> files, const SaveOptions& options) const {
    if (rank != group.rank() || size != group.size() || !is_alike(options) || names.size() != files.size())
      return false;
    for (size_t f = 0; f < files.size(); ++f) {
      const bool same = std::equal(
          views[f].begin(), views[f].end(), files[f].tensors.begin(), files[f].tensors.end(),
          [](const auto& a, const auto& b) { return a.dtype == b.dtype && a.name == b.name && a.region == b.region; });
      if (names[f] != files[f].name || !same) return false;
    }
    return true;
  }

  size_t count() const {
    size_t all = 0;
    for (const auto& mine : views) all += mine.size();
    return all;
  }
};

class Shelf {
 public:
  using Plan = std::shared_ptr<const KeptPlan>;

  Plan find(const Group& group, std::span<const SaveFile> files, const SaveOptions& options) {
    for (const Kept& one : all()) {
      if (one.asked->is(group, files, options)) return one.plan;
    }
    return nullptr;
  }

  /// What another rank of this process made of the same.
  std::shared_ptr<const Arrangement> arrangement(const Request& asked, const SaveOptions& options,
                                                 const std::vector<Sharing>& sharings) {
    for (const Kept& one : all()) {
      const bool same = std::equal(one.plan->sharings.begin(), one.plan->sharings.end(), sharings.begin(),
                                   sharings.end(), [](const Sharing& a, const Sharing& b) { return a.name == b.name; });
      if (same && one.asked->size == asked.size && one.asked->names == asked.names && one.asked->is_alike(options))
        return one.plan->arrangement;
    }
    return nullptr;
  }

  void keep(std::shared_ptr<const Request> asked, Plan plan) {
    const std::scoped_lock lock(mutex_);
    kept_.push_front({std::move(asked), std::move(plan)});
    std::map<std::pair<int, int>, size_t> plans;
    std::set<const Arrangement*> counted;
    size_t tensors = 0;
    std::erase_if(kept_, [&](const Kept& one) {  // the oldest last
      tensors += one.asked->count();
      if (counted.insert(one.plan->arrangement.get()).second) tensors += one.plan->arrangement->tensors().size();
      return ++plans[{one.asked->rank, one.asked->size}] > kMostPlans || tensors > kMostTensors;
    });
  }

  void forget() {
    const std::scoped_lock lock(mutex_);
    kept_.clear();
  }

 private:
  struct Kept {
    std::shared_ptr<const Request> asked;
    Plan plan;
  };

  std::deque<Kept> all() {
    const std::scoped_lock lock(mutex_);
    return kept_;
  }

  std::mutex mutex_;
  std::deque<Kept> kept_;  // the latest first
};

Shelf& shelf() {
  static Shelf one;
  return one;
}

/// The view of each tensor and piece that this rank owns some of, found again in the arrangement.
std::vector<OwnPart> own_parts(int rank, const Arrangement& arrangement, const std::vector<Sharing>& sharings,
                               std::span<const SaveFile> files) {
  std::vector<std::vector<std::pair<size_t, size_t>>> views(arrangement.tensors().size());  // (file, view)
  for (size_t f = 0; f < files.size(); ++f) {
    const auto& tensors = files[f].tensors;
    Finder finder(*sharings[f].tensors);
    for (size_t v = 0; v < tensors.size(); ++v)
      views[arrangement.first_of(f) + *finder.find(tensors[v].name)].emplace_back(f, v);
  }
  std::vector<OwnPart> own;
  for (size_t t = 0; t < views.size(); ++t) {
    for (const Owned& owned : arrangement.owners(t, rank)) {
      const Region& held = arrangement.tensors()[t].pieces[owned.piece].region;
      const auto [f, v] = *std::find_if(views[t].begin(), views[t].end(), [&](const auto& at) {
        return files[at.first].tensors[at.second].region == held;
      });
      own.push_back({f, v, t, owned.piece, owned.region, owned.local_begin});
    }
  }
  return own;
}

}  // namespace

void forget_plans() {
  shelf().forget();
}

std::shared_ptr<const KeptPlan> kept_plan(const Group& group, std::span<const SaveFile> files,
                                          const SaveOptions& options) {
  return shelf().find(group, files, options);
}

std::shared_ptr<const KeptPlan> new_plan(const Group& group, std::span<const SaveFile> files,
                                         const SaveOptions& options, std::vector<Sharing> sharings) {
  auto asked = std::make_shared<const Request>(group, files, options);
  std::shared_ptr<const Arrangement> arrangement = shelf().arrangement(*asked, options, sharings);
  if (!arrangement) {
    std::vector<Volume> volumes;
    for (size_t f = 0; f < files.size(); ++f) {
      check_whole(*sharings[f].tensors);
      volumes.push_back({files[f].name, sharings[f].tensors});
    }
    arrangement = std::make_shared<const Arrangement>(volumes, options);
  }
  std::vector<OwnPart> own = own_parts(group.rank(), *arrangement, sharings, files);
  auto plan = std::make_shared<const KeptPlan>(KeptPlan{std::move(sharings), std::move(arrangement), std::move(own)});
  shelf().keep(std::move(asked), plan);
  return plan;
}

}  // namespace shardow::file
