// Schedule: how much of the old average survives each update.
//
// A schedule is a value: a kind with its numbers. factors() is a pure function of where training stands, computed in float64; the kernels round
// its results once. Equal JSON means equal behaviour, now and after a resume.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace shardow {

/// Where training stands when an average is due.
struct Progress {
  int64_t step = 0;      ///< optimizer steps taken, this one included: 1 at the first update
  int64_t updates = 0;   ///< averages applied before this one
  int64_t delta = 1;     ///< steps since the last applied update; 1 unless update_every > 1 or steps were skipped
  double samples = 0;    ///< training samples seen, this step's included; 0 if the caller does not say
  double delta_samples = 0;  ///< samples since the last applied update
};

/// The two weights of one update, e <- decay e + weight p. Both are kept: weight = 1 - decay exactly for one step, and for n steps
/// decay = d^n, weight = -expm1(n ln d), where 1 - decay would lose digits.
struct Factors {
  double decay;
  double weight;
};

class Schedule {
 public:
  static Schedule constant(double decay);

  static Schedule from_json(std::string_view json);
  std::string to_json() const;

  /// Throws kInvalidArgument where the schedule needs samples and the caller gives none.
  Factors factors(const Progress& progress) const;

  bool operator==(const Schedule&) const = default;

 private:
  std::string kind_;
  std::map<std::string, double> numbers_;
};

}  // namespace shardow
