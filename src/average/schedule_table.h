// The table of schedules: each row defines a kind.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shardow/schedule.h"

namespace shardow::average {

/// Limits a number; both ends are included, and whole numbers are checked as such.
struct Range {
  double least, most;
  bool whole = false;
  bool positive = false;  ///< `least` itself is excluded
};

struct Parameter {
  std::string_view name;
  Range range;
  double otherwise = std::numeric_limits<double>::quiet_NaN();  ///< default; NaN: it must be given
};

struct Kind {
  using OfUpdate = Factors (*)(std::span<const double> numbers, const Progress& progress);
  using OfStep = double (*)(std::span<const double> numbers,
                            double n);  ///< decay of step n, a whole number in a double

  std::string_view name;
  std::vector<Parameter> parameters;
  std::variant<OfUpdate, OfStep> formula;
  bool rising = false;    ///< no number may be below the one before
  bool settable = false;  ///< its number is state, which set_decay() changes; key() lacks it

  /// Returns an update's factors: a formula of steps gives the product of the decays since the last update.
  Factors factors(std::span<const double> numbers, const Progress& progress) const;
};

std::span<const Kind> schedule_table();

/// Makes any schedule by the name of its kind, as in JSON; numbers that are left out have their defaults.
struct [[gnu::visibility("hidden")]] Schedules {
  using Numbers = std::map<std::string, double, std::less<>>;
  static Schedule make(std::string_view kind, const Numbers& numbers);
  static std::vector<std::string_view> kinds();
  static bool is_settable(const Schedule& schedule);
};

/// Returns gamma of the power function with this relative width.
double power_gamma(double sigma_rel);

}  // namespace shardow::average
