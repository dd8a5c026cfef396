// With d_p(n) the decay of profile p at update n, w_p(n) its weight, and G_pq(n) = <p after n, q after n>:
//
//   G_pq(n) = d_p(n) d_q(n) G_pq(n - 1) + w_p(n) w_q(n),    G_pq(0) = 1
//   <p after a, q after b> = G_pq(a) d_q(a + 1) ... d_q(b)    for a <= b
//
// All terms are positive: nothing cancels. The difference of two profiles is summed from the last update to the first,
// where d_p(n + 1) ... d_p(end) is known; factors are worked out anew for a chunk of updates at a time.
#include "posthoc/profiles.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "average/schedule_table.h"
#include "base/errors.h"
#include "base/json_object.h"

namespace shardow::posthoc {
namespace {

constexpr int64_t kChunk = 1 << 14;
constexpr double kMostWork = 3e11;  // products of decays: some ten minutes

/// What a file says is not what this does for ever.
void check_work(const Updates& updates, size_t profiles, size_t targets) {
  const double work =
      static_cast<double>(updates.size()) * static_cast<double>(profiles + targets) * static_cast<double>(profiles + 2);
  if (work <= kMostWork) return;
  base::fail(Code::kUnsupported,
             "{} updates of {} averages, for {} others at once, are {:.2g} products, more than {:.2g}: give fewer "
             "widths, or keep fewer averages' "
             "snapshots in the directory",
             updates.size(), profiles, targets, work, kMostWork);
}

struct Share {
  long double decay, weight;
};

/// What several profiles have of each update. Power functions of one update share a logarithm: with millions of updates
/// that is what counts.
class Shares {
 public:
  explicit Shares(std::vector<Profile> profiles) : profiles_(std::move(profiles)) {
    for (const Profile& profile : profiles_) {
      exponents_.emplace_back();
      for (const Schedule& schedule : profile) {
        if (average::Schedules::is_settable(schedule)) {
          base::fail(
              Code::kUnsupported,
              "a decay that set_decay() changes: snapshots do not say which decay each update had; average after "
              "the fact with other schedules");
        }
        const auto sigma_rel = sigma_rel_of(schedule);
        exponents_.back().push_back(sigma_rel ? average::power_gamma(*sigma_rel) + 1 : 0);
      }
    }
  }

  void of(const Updates::Update& update, Share* into) const {
    const double log =
        update.copies
            ? 0
            : std::log1p(-static_cast<double>(update.progress.delta) / static_cast<double>(update.progress.step));
    for (size_t p = 0; p < profiles_.size(); ++p) {
      if (update.copies) {
        into[p] = {0, 1};
      } else if (const double exponent = exponents_[p][update.segment]; exponent > 0) {
        const long double weight = -std::expm1(exponent * log);
        into[p] = {1 - weight, weight};
      } else {
        const Factors factors = profiles_[p][update.segment].factors(update.progress);
        into[p] = {factors.decay, factors.weight};
      }
    }
  }

  size_t size() const noexcept { return profiles_.size(); }

 private:
  std::vector<Profile> profiles_;
  std::vector<std::vector<double>> exponents_;  // gamma + 1 by profile and segment; 0 for what is no power function
};

std::vector<Profile> joined(std::span<const Profile> profiles, std::span<const Profile> more) {
  std::vector<Profile> all(profiles.begin(), profiles.end());
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// exact_products() under way. Rows of `pairs_` are profiles, then targets; columns are profiles.
class Sums {
 public:
  Sums(std::span<const Profile> profiles, std::span<const Point> points, std::span<const Profile> targets)
      : points_(points), kept_(profiles.size()), rows_(joined(profiles, targets)) {
    pairs_.assign(rows_.size(), std::vector<long double>(kept_, 1));
    norms_.assign(rows_.size(), 1);
    since_.assign(rows_.size(), 1);
    now_.resize(rows_.size());
  }

  void update(const Updates::Update& update) {
    rows_.of(update, now_.data());
    for (size_t p = 0; p < rows_.size(); ++p) {
      const auto [d, w] = now_[p];
      for (size_t q = 0; q < kept_; ++q) pairs_[p][q] = d * now_[q].decay * pairs_[p][q] + w * now_[q].weight;
      norms_[p] = d * d * norms_[p] + w * w;
      since_[p] *= d;
    }
  }

  /// The next point is reached.
  void take(std::vector<std::vector<long double>>& gram) {
    catch_up();
    const size_t j = held_.size(), profile = points_[j].profile;
    held_.emplace_back(rows_.size());
    for (size_t p = 0; p < rows_.size(); ++p) held_[j][p] = pairs_[p][profile];
    for (size_t i = 0; i <= j; ++i) gram[i][j] = gram[j][i] = held_[i][profile];
  }

  std::vector<Products::Target> targets() {
    catch_up();
    std::vector<Products::Target> found;
    for (size_t p = kept_; p < rows_.size(); ++p) {
      found.push_back({{}, norms_[p]});
      for (const auto& one : held_) found.back().with.push_back(one[p]);
    }
    return found;
  }

 private:
  /// held_ is brought to this update.
  void catch_up() {
    for (auto& one : held_) {
      for (size_t p = 0; p < rows_.size(); ++p) one[p] *= since_[p];
    }
    std::fill(since_.begin(), since_.end(), 1);
  }

  std::span<const Point> points_;
  size_t kept_;
  Shares rows_;
  std::vector<std::vector<long double>> pairs_, held_;  // held_[j][p]: of point j with p as it is now
  std::vector<long double> norms_, since_;  // since_: decays multiplied since held_ was last brought up to date
  std::vector<Share> now_;
};

}  // namespace

std::optional<double> sigma_rel_of(const Schedule& schedule) {
  const std::string json = schedule.to_json();
  simdjson::dom::parser parser;
  const auto object = base::object_in(parser, json);
  double sigma_rel = 0;
  if (!object || (*object)["sigma_rel"].get(sigma_rel) != simdjson::SUCCESS) return std::nullopt;
  return sigma_rel;
}

Products exact_products(const Updates& updates, std::span<const Profile> profiles, std::span<const Point> points,
                        std::span<const Profile> targets, const Poll& poll) {
  check_work(updates, profiles.size(), targets.size());
  Sums sums(profiles, points, targets);
  Products found{std::vector(points.size(), std::vector<long double>(points.size())), {}};
  size_t next = 0;
  for (int64_t n = 0; n <= updates.size(); ++n) {
    if (n % kChunk == 0 && poll) poll();
    for (; next < points.size() && points[next].updates == n; ++next) sums.take(found.gram);
    if (n < updates.size()) sums.update(updates.at(n));
  }
  found.targets = sums.targets();
  return found;
}

Products power_products(std::span<const PowerPoint> points, std::span<const PowerPoint> targets) {
  const auto product = [](const PowerPoint& a, const PowerPoint& b) -> long double {
    const bool a_first = a.time < b.time;
    const long double ratio = static_cast<long double>(a_first ? a.time : b.time) / (a_first ? b.time : a.time);
    const long double ga = a.gamma, gb = b.gamma;
    return (ga + 1) * (gb + 1) * std::pow(ratio, a_first ? gb : ga) / ((ga + gb + 1) * std::max(a.time, b.time));
  };
  Products found;
  for (const PowerPoint& a : points) {
    found.gram.emplace_back();
    for (const PowerPoint& b : points) found.gram.back().push_back(product(a, b));
  }
  for (const PowerPoint& target : targets) {
    found.targets.push_back({{}, product(target, target)});
    for (const PowerPoint& one : points) found.targets.back().with.push_back(product(one, target));
  }
  return found;
}

Difference difference(const Updates& updates, std::span<const Profile> profiles, std::span<const Point> points,
                      std::span<const double> coefficients, const Profile& target, const Poll& poll) {
  const size_t k = profiles.size();
  std::vector<long double> tail(
      k + 1);  // of each profile: its points' coefficients times the decays that come after; of the target: -1
  tail[k] = -1;
  size_t next = points.size();
  const auto reach = [&](int64_t n) {
    for (; next > 0 && points[next - 1].updates == n; --next) tail[points[next - 1].profile] += coefficients[next - 1];
  };
  long double squares = 0, sizes = 0, norm = 0;
  const auto add = [&](long double off, long double own) {
    squares += off * off;
    sizes += std::fabs(off);
    norm += own * own;
  };
  const Shares shares(joined(profiles, std::span(&target, 1)));
  std::vector<Share> chunk(static_cast<size_t>(kChunk) * (k + 1));
  for (int64_t end = updates.size(), begin = 0; end > 0; end = begin) {
    if (poll) poll();
    begin = std::max<int64_t>(end - kChunk, 0);
    for (int64_t n = begin; n < end; ++n) shares.of(updates.at(n), &chunk[static_cast<size_t>(n - begin) * (k + 1)]);
    for (int64_t n = end; n > begin; --n) {
      reach(n);
      const Share* now = &chunk[static_cast<size_t>(n - 1 - begin) * (k + 1)];
      long double off = 0;
      for (size_t p = 0; p <= k; ++p) off += now[p].weight * tail[p];
      add(off, now[k].weight * tail[k]);
      for (size_t p = 0; p <= k; ++p) tail[p] *= now[p].decay;
    }
  }
  reach(0);
  long double off = 0;
  for (const long double one : tail) off += one;
  add(off, tail[k]);
  return {static_cast<double>(std::sqrt(squares / norm)), static_cast<double>(sizes / 2)};
}

}  // namespace shardow::posthoc
