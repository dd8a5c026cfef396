// Formulas at their edges, and JSON. python/tests/schedules compares them with the code of the upstream projects.
#include "shardow/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "average/schedule_table.h"
#include "shardow/error.h"

namespace shardow {
namespace {

Code code_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return Code::kInternal;
}

/// Returns a valid schedule of every kind, numbers away from their defaults where the ranges allow.
std::vector<Schedule> one_of_each() {
  std::vector<Schedule> all;
  for (const average::Kind& kind : average::schedule_table()) {
    average::Schedules::Numbers numbers;
    for (const average::Parameter& parameter : kind.parameters) {
      const bool whole = parameter.range.whole;
      numbers.emplace(
          parameter.name,
          whole ? 1 : std::min(parameter.range.most, 1.0) * 0.7 + 0.01 * static_cast<double>(numbers.size()));
    }
    all.push_back(average::Schedules::make(kind.name, numbers));
  }
  return all;
}

TEST(Schedule, ConstantKeepsDecayAndWeightExact) {
  for (const double d : {0.0, 0.1, 0.999, 0.9999999, 1.0}) {
    const Factors factors = Schedule::constant(d).factors({.step = 5});
    EXPECT_EQ(factors.decay, d);
    EXPECT_EQ(factors.weight, 1 - d);
  }
}

TEST(Schedule, SeveralStepsAtOnceKeepTheDigitsOfASmallWeight) {
  const Factors factors = Schedule::constant(1 - 1e-12).factors({.step = 3, .delta = 3});
  EXPECT_NEAR(factors.weight, 3e-12, 3e-16);
  EXPECT_EQ(Schedule::constant(0).factors({.step = 3, .delta = 3}).weight, 1);
  EXPECT_EQ(Schedule::constant(1).factors({.step = 3, .delta = 3}).weight, 0);
}

TEST(Schedule, PowerFunctionSolvesForGamma) {
  const struct { double sigma, gamma; } known[] = {{0.05, 16.97}, {0.10, 6.94}, {0.15, 3.56}, {0.25, 0.72}};
  for (const auto& [sigma, gamma] : known) {
    const double g = average::power_gamma(sigma);
    EXPECT_NEAR(g, gamma, 0.01);
    EXPECT_NEAR(std::sqrt((g + 1) / ((g + 2) * (g + 2) * (g + 3))), sigma, 1e-14);
  }
}

TEST(Schedule, MeanCountsUpdates) {
  EXPECT_EQ(Schedule::mean().factors({.step = 100, .updates = 0, .delta = 100}).weight, 1);
  EXPECT_EQ(Schedule::mean().factors({.step = 400, .updates = 3, .delta = 100}).weight, 0.25);
}

TEST(Schedule, EveryKindStaysInRange) {
  for (const Schedule& schedule : one_of_each()) {
    for (const int64_t step : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{50}, int64_t{1000000}}) {
      for (const int64_t delta : {int64_t{1}, std::min<int64_t>(step, 20)}) {
        const Factors factors =
            schedule.factors({step, step - 1, delta, static_cast<double>(step), static_cast<double>(delta)});
        EXPECT_GE(factors.weight, 0) << schedule.to_json() << step;
        EXPECT_LE(factors.weight, 1) << schedule.to_json() << step;
        EXPECT_NEAR(factors.weight + factors.decay, 1, 1e-12) << schedule.to_json() << step;
      }
    }
  }
}

TEST(Schedule, MoreStepsThanThereWereAreAsManyAsThereWere) {
  for (const Schedule& schedule : one_of_each()) {
    const Factors all = schedule.factors({.step = 7, .updates = 2, .delta = 7, .samples = 9, .delta_samples = 9});
    const Factors more = schedule.factors({.step = 7, .updates = 2, .delta = 96, .samples = 9, .delta_samples = 9});
    EXPECT_EQ(more.weight, all.weight) << schedule.to_json();
    EXPECT_EQ(more.decay, all.decay) << schedule.to_json();
  }
  EXPECT_EQ(Schedule::debiased(0.99).factors({.step = 1, .delta = 97}).weight, 1);
}

/// Returns ln of the decay over the last `delta` of `step` steps, added one by one, with what each addition lost.
double log_of_steps(const Schedule& schedule, int64_t step, int64_t delta) {
  double sum = 0, lost = 0;
  for (int64_t n = step - delta + 1; n <= step && sum > -40; ++n) {
    const double y = std::log(schedule.factors({n, n - 1, 1, 0, 0}).decay) - lost, t = sum + y;
    lost = (t - sum) - y;
    sum = t;
  }
  return sum;
}

TEST(Schedule, ManyStepsAtOnceAreTheProductOfTheirDecays) {
  const Schedule schedules[] = {
      Schedule::warmup(0.99999),
      Schedule::warmup(1),
      Schedule::tf_warmup(0.9999999),
      Schedule::inverse_gamma(1, 2.0 / 3, 0, 0.99999),
      Schedule::inverse_gamma(3, 0.75, 0.999, 1, 2000),
      Schedule::inverse_gamma(1, 1),
      Schedule::inverse_gamma(1e5, 0.1, 0.99995, 0.999999, 30'000),
      Schedule::timm(0.999999, 0.9, 5, true),
      Schedule::diffusers(0.9999999, 0.5, 3),
      Schedule::diffusers(0.9999999, 0.99999, 3, true),
      Schedule::ema_pytorch(0.999999, 50, 1, 2.0 / 3, 0.9999),
      Schedule::dist_ema(0.99999, true, 0.9, 0.9999, 2, 9),
      Schedule::linear(0.9999, 1, 120'000),
      Schedule::linear(1, 0.9999, 80'000),
      Schedule::linear(0, 1, 30'000),
      Schedule::cosine(0.99999, 1, 100'000),
      Schedule::cosine(0, 0.999999, 50'000),
      Schedule::half_life_fraction(0.09, 1e6),
      Schedule::half_life_fraction(50, 1e9),
  };
  const struct {
    int64_t step, delta;
  } cases[] = {{5'000, 4'990}, {60'000, 5'000}, {150'000, 140'000}, {150'000, 150'000}};
  for (const Schedule& schedule : schedules) {
    for (const auto& [step, delta] : cases) {
      const double expected = log_of_steps(schedule, step, delta);
      const Factors factors = schedule.factors({step, 1, delta, 0, 0});
      EXPECT_NEAR(factors.weight, -std::expm1(expected), 1e-9 * -std::expm1(expected) + 1e-15)
          << schedule.to_json() << step << " " << delta;
      EXPECT_NEAR(factors.decay, std::exp(expected), 1e-9 * std::exp(expected) + 1e-15)
          << schedule.to_json() << step << " " << delta;
    }
  }
}

TEST(Schedule, AWindowIsThePlainMeanOfItsUpdatesAndHeldAfterwards) {
  const Schedule window = Schedule::window(100, 200);
  for (const int64_t every : {1, 3, 10, 40}) {
    double mean = -1, sum = 0, count = 0;
    for (int64_t step = every; step <= 400; step += every) {
      const auto value = static_cast<double>(step * step % 997);
      const Factors factors = window.factors({step, 1, every, 0, 0});
      mean = factors.decay * mean + factors.weight * value;
      if (step < 100) {
        EXPECT_EQ(mean, value) << "before its first step the average is the weights";
      } else if (step <= 200) {
        sum += value;
        ++count;
      }
      if (count > 0) {
        EXPECT_NEAR(mean, sum / count, 1e-9) << step << " every " << every;
      }
    }
  }
  EXPECT_EQ(Schedule::window(5, 5).factors({.step = 5}).decay, 0);
  EXPECT_EQ(Schedule::window(5, 5).factors({.step = 6}).weight, 0);
  EXPECT_EQ(code_of([] { Schedule::window(5, 4); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([] { Schedule::window(0, 4); }), Code::kInvalidArgument);
}

TEST(Schedule, AnyNumberOfStepsCostsLittle) {
  for (const Schedule& schedule : one_of_each()) {
    const Factors factors =
        schedule.factors({int64_t{1} << 52, 3, int64_t{1} << 51, 1e9, 1e9});  // one by one: for weeks
    EXPECT_GE(factors.weight, 0) << schedule.to_json();
    EXPECT_LE(factors.weight, 1) << schedule.to_json();
  }
}

TEST(Schedule, JsonRoundTripsEveryKind) {
  for (const Schedule& schedule : one_of_each()) {
    EXPECT_EQ(Schedule::from_json(schedule.to_json()), schedule) << schedule.to_json();
  }
  EXPECT_EQ(Schedule::constant(0.1 + 0.2).to_json(), R"({"kind":"constant","decay":0.30000000000000004})");
  const Schedule unbounded = Schedule::half_life_fraction(0.09, std::numeric_limits<double>::infinity());
  EXPECT_EQ(unbounded.to_json(), R"({"kind":"half_life_fraction","fraction":0.09})");
  EXPECT_EQ(Schedule::from_json(unbounded.to_json()), unbounded);
}

TEST(Schedule, KeysAreTheKindAndTheNumbersOfTheJson) {
  EXPECT_EQ(Schedule::constant(0.9999).key(), "0.9999");
  EXPECT_EQ(Schedule::constant(0.00001).key(), "1e-05");
  EXPECT_EQ(Schedule::constant(1).key(), "1");
  EXPECT_EQ(Schedule::constant(-0.0).key(), "0");
  EXPECT_EQ(Schedule::mean().key(), "mean()");
  EXPECT_EQ(Schedule::power(0.1).key(), "power(sigma_rel=0.1)");
  EXPECT_EQ(Schedule::half_life(9999999999999998.0).key(), "half_life(steps=9999999999999998)");
  EXPECT_EQ(Schedule::half_life(1e16).key(), "half_life(steps=1e+16)");
  EXPECT_EQ(Schedule::half_life_fraction(0.09, std::numeric_limits<double>::infinity()).key(),
            "half_life_fraction(fraction=0.09)");
  EXPECT_EQ(Schedule::timm(0.9, 0, 3, true).key(),
            "timm(decay=0.9,min_decay=0,update_after_step=3,use_warmup=1,gamma=1,power=0.6666666666666666)");
  std::set<std::string> keys;
  for (const Schedule& schedule : one_of_each()) EXPECT_TRUE(keys.insert(schedule.key()).second) << schedule.key();
}

TEST(Schedule, RefusesWhatIsNoSchedule) {
  for (const char* json :
       {"", "[]", "{}", R"({"kind":"none"})", R"({"kind":"constant"})", R"({"kind":"constant","decay":"0.9"})",
        R"({"kind":"constant","decay":2})", R"({"kind":"constant","decay":0.9,"decay":0.8})",
        R"({"kind":"constant","decay":0.9,"x":1})"}) {
    EXPECT_EQ(code_of([&] { Schedule::from_json(json); }), Code::kCorrupt) << json;
  }
  EXPECT_EQ(code_of([] { Schedule::constant(-0.1); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([] { Schedule::half_life_in_samples(10).factors({}); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([] { Schedule::constant(0.9).factors({.step = 0}); }), Code::kInvalidArgument);
}

}  // namespace
}  // namespace shardow
