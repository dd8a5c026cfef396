#include "posthoc/record.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <span>
#include <stdexcept>

#include "file/crc.h"
#include "posthoc/profiles.h"
#include "shardow/error.h"

namespace shardow::posthoc {
namespace {

std::string with_updates(const std::string& updates, const std::string& start_step = "0") {
  return R"({"format":1,"segments":[{"run":"a","start_step":)" + start_step +
         R"(,"schedules":{"0.9":{"kind":"constant","decay":0.9}},"updates":)" + updates + "}]}";
}

TEST(Record, SaysEachUpdate) {
  // The first two copy; then 4, 6, 8, 9, 10; the record goes on in another process at 20.
  Record record = record_from_json(with_updates("[[1,1,2],[4,2,3],[9,1,2]]", "2"));
  record.push_back(record_from_json(with_updates("[[20,5,2]]", "2"))[0]);
  const Updates updates(record);
  struct Expected {
    int64_t step, updates, delta;
    bool copies;
  };
  const std::vector<Expected> expected = {{1, 0, 1, true},  {1, 0, 1, true},    {2, 0, 2, false},
                                          {4, 1, 2, false}, {6, 2, 2, false},   {7, 3, 1, false},
                                          {8, 4, 1, false}, {18, 5, 10, false}, {23, 6, 5, false}};
  ASSERT_EQ(updates.size(), static_cast<int64_t>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    const Updates::Update one = updates.at(static_cast<int64_t>(i));
    EXPECT_EQ(one.copies, expected[i].copies) << i;
    EXPECT_EQ(one.segment, i < 7 ? 0U : 1U);
    EXPECT_EQ(one.progress.step, expected[i].step) << i;
    if (!one.copies) {
      EXPECT_EQ(one.progress.updates, expected[i].updates) << i;
      EXPECT_EQ(one.progress.delta, expected[i].delta) << i;
    }
  }
  EXPECT_EQ(updates.until(0), 0);
  EXPECT_EQ(updates.until(7), 4);
  EXPECT_EQ(updates.until(1000), updates.size());
  EXPECT_EQ(Updates(until(record, 7)).size(), 4);
  EXPECT_TRUE(same_past(until(record, 10), until(until(record, 19), 10)));
  EXPECT_FALSE(same_past(until(record, 10), until(record, 9)));
}

/// With what was before each, however many there are.
TEST(Record, SaysEachUpdateOfManyStretches) {
  std::vector<Stretch> all;
  std::vector<int64_t> steps;
  for (int64_t i = 0, step = 1; i < 1000; ++i, step = steps.back() + 5) {
    all.push_back({step, 1 + i % 3, 1 + i % 4});
    for (int64_t k = 0; k < all.back().count; ++k) steps.push_back(step + k * all.back().every);
  }
  const Updates updates(Record{{"a", {}, 0, {}, all}});
  ASSERT_EQ(updates.size(), static_cast<int64_t>(steps.size()));
  for (size_t i = 0; i < steps.size(); ++i) {
    const Progress progress = updates.at(static_cast<int64_t>(i)).progress;
    EXPECT_EQ(progress.step, steps[i]) << i;
    EXPECT_EQ(progress.delta, steps[i] - (i == 0 ? 0 : steps[i - 1])) << i;
    EXPECT_EQ(progress.updates, static_cast<int64_t>(i)) << i;
    EXPECT_EQ(updates.until(steps[i]), static_cast<int64_t>(i) + 1);
  }
}

/// What a record may make a program ask memory for.
TEST(Record, RefusesMoreThanMemoryIsMeantFor) {
  const auto code_of = [](const auto& fn) {
    try {
      fn();
    } catch (const Error& error) {
      return error.code();
    }
    return Code::kInternal;
  };
  EXPECT_EQ(code_of([] { record_from_json(with_updates("[" + std::string(size_t{33} << 20, ' ') + "]")); }),
            Code::kUnsupported);
  check_stretches(kMostStretches);
  EXPECT_EQ(code_of([] { check_stretches(kMostStretches + 1); }), Code::kUnsupported);
}

TEST(Record, SaysSamples) {
  const Updates updates(record_from_json(with_updates("[[1,1,3,8,8],[5,2,2,40,16]]")));
  const std::vector<double> seen = {8, 16, 24, 40, 56}, since = {8, 8, 8, 16, 16};
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(updates.at(static_cast<int64_t>(i)).progress.samples, seen[i]);
    EXPECT_EQ(updates.at(static_cast<int64_t>(i)).progress.delta_samples, since[i]);
  }
}

std::string with_packed(const std::string& text) {
  const uint32_t crc = file::crc32(0, std::as_bytes(std::span(text)));
  return fmt::format(
      R"({{"format":2,"segments":[{{"run":"a","start_step":0,"schedules":{{}},"packed":{{"crc32":"{:08x}","text":"{}"}}}}]}})",
      crc, text);
}

TEST(Record, ReadsPackedUpdatesOfTheFirstVersions) {
  EXPECT_EQ(record_from_json(with_packed(".CAA*8CA"))[0].updates, (std::vector<Stretch>{{1, 1, 49}}));
  EXPECT_EQ(record_from_json(with_packed("#CCA-CC=10.5;A"))[0].updates,
            (std::vector<Stretch>{{1, 2, 2, 1, 2}, {4, 1, 2, 10.5, 1}}));
  for (const char* bad : {"",
                          "x",
                          "#",
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
                          "#CC=1e308;=1.7e308;*+C"}) {
    try {
      record_from_json(with_packed(bad));
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt) << bad;
    }
  }
  EXPECT_THROW(record_from_json(with_packed(".CAA*ggggggggC")), Error);  // 2^39 of them
  std::string damaged = with_packed(".CAA*8CA");
  damaged[damaged.find("*8")] = 'A';
  EXPECT_THROW(record_from_json(damaged), Error);
}

TEST(Record, EndsAtAStep) {
  const Record all{{"a", {}, 0, {}, {{1, 1, 3, 8, 8}, {5, 2, 3, 40, 16}}}, {"b", {}, 0, {}, {{20, 1, 1, 90, 0}}}};
  EXPECT_EQ(until(all, 100).size(), 2U);
  EXPECT_EQ(until(all, 8)[0].updates, (std::vector<Stretch>{{1, 1, 3, 8, 8}, {5, 2, 2, 40, 16}}));
  EXPECT_EQ(until(all, 5)[0].updates, (std::vector<Stretch>{{1, 1, 3, 8, 8}, {5, 1, 1, 40, 0}}));
  EXPECT_EQ(until(until(all, 8), 2)[0].updates, (std::vector<Stretch>{{1, 1, 2, 8, 8}}));
  EXPECT_TRUE(until(all, 0).empty());
}

Record of_runs(const std::vector<std::pair<std::string, int64_t>>& runs,
               const std::vector<std::string>& replaces = {}) {
  Record record;
  for (int64_t before = 0; const auto& [run, last] : runs) {
    record.push_back({run, {}, 0, {{"0.9", Schedule::constant(0.9)}}, {{before + 1, 1, last - before}}});
    before = last;
  }
  record.back().replaces = replaces;
  return record;
}

TEST(Record, SaysWhatWasGivenUp) {
  const Record first = of_runs({{"a", 100}}), resumed = of_runs({{"a", 50}, {"b", 70}}),
               again = of_runs({{"a", 50}, {"c", 60}}, {"b"});
  EXPECT_TRUE(gives_up(resumed, first));  // before the end of a's
  EXPECT_FALSE(gives_up(first, resumed));
  EXPECT_TRUE(gives_up(again, first));
  EXPECT_TRUE(gives_up(again, resumed));  // it says so
  EXPECT_FALSE(gives_up(resumed, again));
  EXPECT_FALSE(gives_up(of_runs({{"a", 50}, {"c", 60}}), resumed));
  EXPECT_FALSE(gives_up(first, {}));
  EXPECT_FALSE(gives_up(of_runs({{"a", 70}}), first));  // one process
  EXPECT_FALSE(same_past(until(again, 60), until(of_runs({{"a", 50}, {"b", 60}}), 60)));
  EXPECT_TRUE(same_past(until(again, 50), until(resumed, 50)));
  EXPECT_FALSE(gives_up(of_runs({{"", 50}, {"b", 60}}), of_runs({{"", 50}})));  // no name, no knowledge
  const std::string json =
      R"({"format":1,"segments":[{"run":"c","replaces":["a","b"],"start_step":0,"schedules":{},"updates":[[1,1,2]]}]})";
  EXPECT_EQ(record_from_json(json)[0].replaces, (std::vector<std::string>{"a", "b"}));
}

TEST(Products, AreBoundedAndCanBeEnded) {
  const Updates updates(record_from_json(with_updates("[[1,1,90000000]]")));
  const Profile profile(1, Schedule::constant(0.9));
  const std::vector<Profile> one(1, profile), many(60, profile);
  const std::vector<Point> points = {{0, updates.size()}};
  EXPECT_THROW(exact_products(updates, many, points, one), Error);
  int polls = 0;
  const Poll poll = [&] {
    if (++polls == 3) throw std::runtime_error("enough");
  };
  EXPECT_THROW(exact_products(updates, one, points, one, poll), std::runtime_error);
  EXPECT_EQ(polls, 3);
  polls = 0;
  EXPECT_THROW(difference(updates, one, points, std::vector<double>(1, 1.0), profile, poll), std::runtime_error);
}

TEST(Record, RefusesWhatNoRunCanHaveMade) {
  for (const std::string& bad :
       {std::string("[]"), std::string("{"), with_updates("[[0,1,2]]"), with_updates("[[1,0,2]]"),
        with_updates("[[1,1,0]]"), with_updates("[[1,1,5],[5,1,1]]"), with_updates("[[1,1]]"),
        with_updates("[[1,1,1,2]]"), with_updates("[[1,1,1,2,-1]]"), with_updates("[1]"),
        with_updates("[[1,9007199254740992,1000]]"), with_updates("[[1,1,-3]]"), with_updates("[[1,1,1]]", "-1"),
        with_updates("[[1,1,9223372036854775807]]"), std::string(R"({"format":1})"),
        std::string(R"({"format":1,"segments":[1]})")}) {
    try {
      record_from_json(bad);
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt) << bad;
    }
  }
  EXPECT_THROW(record_from_json(R"({"format":3,"segments":[]})"), Error);
  EXPECT_THROW(record_from_json(with_updates("[[1,1,900000000],[900000001,1,900000000]]")), Error);  // minutes
}

}  // namespace
}  // namespace shardow::posthoc
