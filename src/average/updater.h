// Updater: makes updates, at once or in the background, and knows of the last one what nobody else does: whether it is
// still under way, what it met, how long it took.
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
  /// Both outlive this.
  Updater(Clock& clock, Storage& storage) : clock_(clock), storage_(storage) {}

  enum class Launch { kNow, kByReplay };
  UpdateReport update(std::optional<int64_t> step, double samples, std::span<const Factors> given = {},
                      Launch launch = Launch::kNow);
  void wait();            ///< until an update in the background has ended; throws what it met
  void finish_reading();  ///< until weights may change
  void reset();           ///< averages = weights; an update that has torn them is forgotten
  void read_counts();     ///< takes in what CUDA updates met since the last call

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
    Counters before;  // those of the last whole update
    NonFiniteCount count = {};
    double seconds = 0, waited = 0;
    bool changed = false;   // some averages are those of this update
    bool released = false;  // finish_reading() let the weights change
    bool stopped = false;   // it failed halfway, and the next wait() takes it up
  };
  struct Met {
    int64_t step, elements;
    size_t part;  // the first with a NaN or Inf; parts.size(): not known
  };

  UpdateReport begin(std::optional<int64_t> step, double samples, std::span<const Factors> given, Launch launch);
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
