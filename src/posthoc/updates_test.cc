#include "posthoc/updates.h"

#include <gtest/gtest.h>

#include <random>

#include "posthoc/record.h"
#include "shardow/error.h"

namespace shardow::posthoc {
namespace {

using Made = std::vector<std::pair<int64_t, double>>;  // step, samples

std::string record_of(const RecordedUpdates& updates) {
  const std::string own = updates.to_json();
  return R"({"format":2,"segments":[{"run":"a","start_step":0,"schedules":{},)" + own.substr(1) + "]}";
}

std::vector<Stretch> stretches_of(const Made& made) {
  std::vector<Stretch> all;
  for (const auto& [step, samples] : made) add_update(all, step, samples);
  return all;
}

struct Kind {
  const char* name;
  int64_t steps_apart_most;
  double least, most;  // samples of an update
  double fraction;     // of a sample
  double bytes;        // of an update, at most
};

std::ostream& operator<<(std::ostream& out, const Kind& run) {
  return out << run.name;
}

class Runs : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Some, Runs,
                         testing::Values(Kind{"batches that differ a little", 1, 500, 512, 1, 1.5},
                                         Kind{"batches", 1, 1, 1024, 1, 2.1}, Kind{"tokens", 1, 30000, 60000, 1, 3.1},
                                         Kind{"tokens, skipped steps", 3, 30000, 60000, 1, 5},
                                         Kind{"fractions", 1, 100, 200, 0.125, 17},
                                         Kind{"steps alone", 20, 0, 0, 1, 1.6},
                                         Kind{"more than 2^31 samples", 2, 1e9, 1e12, 1, 25}),
                         [](const auto& one) { return "Run" + std::to_string(one.index); });

TEST_P(Runs, AreReadAsTheyWereMade) {
  const Kind& run = GetParam();
  std::mt19937_64 random(3);
  std::uniform_int_distribution<int64_t> apart(1, run.steps_apart_most),
      batch(static_cast<int64_t>(run.least / run.fraction), static_cast<int64_t>(run.most / run.fraction));
  Made made;
  RecordedUpdates updates(run.most > 0);
  int64_t step = 0;
  double samples = 0;
  for (int i = 1; i <= 20000; ++i) {
    made.emplace_back(step += apart(random), samples += static_cast<double>(batch(random)) * run.fraction);
    updates.add(step, samples);
    if (i > 40 && i < 19990) continue;  // else while it grows, from few stretches to many
    const Record record = record_from_json(record_of(updates));
    ASSERT_EQ(record[0].updates, stretches_of(made)) << i;
  }
  EXPECT_LT(static_cast<double>(updates.to_json().size()) / 20000, run.bytes);
}

TEST(RecordedUpdates, AreListsWhereTheyAreFew) {
  RecordedUpdates even(false), samples(true);
  EXPECT_TRUE(even.empty());
  for (int64_t step = 1; step <= 1000; ++step) even.add(step, 7);
  for (int64_t step = 1; step <= 1000; ++step) samples.add(step, static_cast<double>(8 * step));
  EXPECT_EQ(even.to_json(), R"({"updates":[[1,1,1000]]})");
  EXPECT_EQ(samples.to_json(), R"({"updates":[[1,1,1000,8,8]]})");
}

TEST(RecordedUpdates, TakeManyAtEvenDistancesAtOnce) {
  for (const int64_t count : {0, 1, 2, 3, 4, 5, 100}) {
    for (const int64_t every : {1, 2, 5}) {
      for (const std::vector<int64_t>& before :
           std::vector<std::vector<int64_t>>{{}, {1}, {1, 2}, {1, 3}, {1, 2, 4}, {1, 2, 3, 5, 7}}) {
        RecordedUpdates one(false), many(false);
        for (const int64_t step : before) one.add(step, 0), many.add(step, 0);
        many.add_evenly(10, every, count);
        for (int64_t k = 0; k < count; ++k) one.add(10 + k * every, 0);
        EXPECT_EQ(many.to_json(), one.to_json()) << count << ", " << every << ", " << before.size();
      }
    }
  }
}

/// Of a long run that is even but for its epochs' last batches.
TEST(RecordedUpdates, OfEpochsTakeAFewBytesEach) {
  RecordedUpdates updates(true);
  Made made;
  double samples = 0;
  for (int64_t step = 1; step <= 100'000; ++step) {
    made.emplace_back(step, samples += step % 1000 == 0 ? 37 : 512);
    updates.add(step, samples);
  }
  EXPECT_LT(updates.to_json().size(), 1200U);
  EXPECT_EQ(record_from_json(record_of(updates))[0].updates, stretches_of(made));
}

TEST(Stretches, ShareTheirMemoryUpToAStep) {
  const Stretches all = {{1, 1, 3, 8, 8}, {5, 2, 3, 40, 16}, {20, 1, 1, 90, 0}};
  EXPECT_EQ(all.until(100), all);
  EXPECT_EQ(all.until(8), Stretches({{1, 1, 3, 8, 8}, {5, 2, 2, 40, 16}}));
  EXPECT_EQ(all.until(5), Stretches({{1, 1, 3, 8, 8}, {5, 1, 1, 40, 0}}));  // as an update is told that is alone
  EXPECT_EQ(all.until(8).until(2), Stretches({{1, 1, 2, 8, 8}}));
  EXPECT_TRUE(all.until(0).empty());
  EXPECT_EQ(all.until(8).memory(), all.memory());
  EXPECT_NE(all.until(8), all.until(6));
  EXPECT_NE(all, Stretches({{1, 1, 3, 8, 8}, {5, 2, 3, 40, 17}, {20, 1, 1, 90, 0}}));
}

/// Each two updates of it are further apart than the last two.
std::string of_stretches(int64_t count) {
  PackedText text(1, std::nullopt);
  for (int64_t i = 0, step = 1; i < count; ++i, step += 200) text.add({step, 1 + i % 100, 2});
  return text.text();
}

Code code_of(const std::string& text) {
  try {
    unpacked(text);
  } catch (const Error& error) {
    return error.code();
  }
  return Code::kInternal;
}

TEST(Unpacked, RefusesWhatNoRunCanHaveMade) {
  EXPECT_EQ(unpacked(".CAA*8CA").size(), 1U);
  for (const std::string bad : {"",
                                "x",
                                "#",
                                ".",
                                ".C!",
                                ".C*C",
                                ".CA*C",
                                ".CAA*A",
                                ".CAA*D",
                                ".CD",
                                ".CAD",
                                "#CC-",
                                "#CCA-D",
                                "#CC=",
                                "#CC=1",
                                "#CC=x;",
                                "#CC=-1;",
                                "#CC=1e999;",
                                "#CC=nan;",
                                "#CC=5;=4;",
                                "#CCAF",
                                ".CAg",
                                ".Cggggggggggggggggggggg",
                                ".C++++++++++/A",

                                "#CC=1e308;=1.7e308;*+C"})
    EXPECT_EQ(code_of(bad), Code::kCorrupt) << bad;
  EXPECT_EQ(code_of(".CAA*ggggggggC"), Code::kUnsupported);  // 2^39 of them
  EXPECT_EQ(unpacked(of_stretches(1000)).size(), 1000U);
  EXPECT_EQ(code_of(of_stretches(kMostStretches + 1)), Code::kUnsupported);
}

TEST(Record, NoticesWhatIsDamaged) {
  RecordedUpdates updates(true);
  for (int64_t step = 1; step <= 500; ++step) updates.add(step, static_cast<double>(step * step));
  const std::string good = record_of(updates);
  record_from_json(good);
  const size_t begin = good.find("\"packed\""), end = good.find("}}");
  for (size_t at = begin; at < end; at += 7) {
    std::string bad = good;
    bad[at] = bad[at] == 'C' ? 'D' : 'C';
    EXPECT_THROW(record_from_json(bad), Error) << at << ": " << bad[at];
  }
}

}  // namespace
}  // namespace shardow::posthoc
