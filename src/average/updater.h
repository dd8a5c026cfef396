// Updater: makes updates, at once or in the background, and keeps the state of the last update: whether it is still
// under way, how many NaN and Inf it met, and how long it took.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "average/clock.h"
#include "average/storage.h"
#include "base/worker.h"
#include "shardow/error.h"

namespace shardow::average {

class Updater {
 public:
  /// Keeps references: both outlive this.
  Updater(Clock& clock, Storage& storage) : clock_(clock), storage_(storage) {}

  enum class Launch { kNow, kByReplay };
  UpdateReport update(std::optional<int64_t> step, double samples, std::span<const Factors> factors = {},
                      Launch launch = Launch::kNow);
  void wait();            ///< waits until an update in the background has ended; throws its error
  void finish_reading();  ///< waits until weights may change
  void reset();           ///< copies the weights into the averages, also where an update has torn them
  void read_counts();     ///< adds the NaN and Inf that CUDA updates met since the last call

  std::optional<NonFiniteReport> non_finite() const;
  void forget_non_finite() noexcept { met_.reset(); }

  struct Seconds {
    double last = 0, hidden = 0, waited = 0;  // of the last update; in the background, of all
  };
  const Seconds& seconds() const noexcept { return seconds_; }

 private:
  /// An update in the background, until the wait() that ends it. While the worker is busy it writes count, seconds and
  /// changed, and averages are its own.
  struct UnderWay {
    kernels::Step step;
    Counters before;  // after the last whole update
    NonFiniteCount count = {};
    double seconds = 0, waited = 0;
    bool changed = false;   // some averages are updated
    bool released = false;  // finish_reading() let the weights change
    bool stopped = false;   // it failed halfway, and the next wait() takes it up
  };
  struct Met {
    int64_t step, elements;
    size_t part;  // the first with a NaN or Inf; parts.size(): not known
  };

  UpdateReport begin(std::optional<int64_t> step, double samples, std::span<const Factors> factors, Launch launch);
  void apply(UpdateReport& report, const kernels::Step& step, double samples, Launch launch);
  void capture();
  NonFiniteCount dispatch(const kernels::Step& step);
  NonFiniteCount prepare(const kernels::Step& step, bool by_runs);
  void work();
  [[noreturn]] void stopped(const Error& cause);
  void hold(const NonFiniteCount& count, int64_t step);
  void refuse_non_finite(const NonFiniteCount& count, int64_t step) const;
  void add(NonFiniteCount& count, const NonFiniteCount& more) const;
  size_t part_of(const NonFiniteCount& count) const;
  std::string name_of(size_t part) const;

  Clock& clock_;
  Storage& storage_;
  std::optional<Error> torn_;  // why the averages are those of no update; until reset()
  std::optional<Met> met_;     // not forgotten yet
  Seconds seconds_;
  std::optional<UnderWay> under_way_;
  int64_t unreported_ = 0;  // NaN and Inf that updates in the background met, until a report tells of them
  base::Worker worker_;     // the last member: ends first
};

}  // namespace shardow::average
