#include "shardow/ema_file.h"

#include <gtest/gtest.h>

#include "shardow/average.h"
#include "shardow/error.h"

namespace shardow {
namespace {

using Keys = std::vector<std::string>;

const std::vector<Schedule> kSchedules = {Schedule::constant(0.9999), Schedule::power(0.1), Schedule::constant(0.5)};

std::string state_of(std::vector<Schedule> schedules) {
  float weight = 1;
  const TensorView view{"w", DType::kF32, Region::whole({1}), &weight};
  AverageOptions options;
  options.schedules = std::move(schedules);
  return Average(std::span(&view, 1), options).state();
}

TEST(EmaFile, KeysAreThoseOfTheSchedulesInTheirOrder) {
  const Keys expected = {"0.9999", "power(sigma_rel=0.1)", "0.5"};
  EXPECT_EQ(decay_keys(kSchedules), expected);
  EXPECT_EQ(decay_keys_in({{"format", "pt"}, {kStateKey, state_of(kSchedules)}}), expected);
}

TEST(EmaFile, EqualSchedulesAreRefusedByName) {
  const std::vector<Schedule> schedules = {Schedule::constant(0.5), Schedule::mean(), Schedule::constant(0.5)};
  try {
    decay_keys(schedules);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_STREQ(error.what(), "decay 0.5 is given twice; each average needs a decay of its own");
  }
}

TEST(EmaFile, WhatIsNoSavedEmaHasNoKeys) {
  EXPECT_EQ(decay_keys_in({{"format", "pt"}}), Keys());
  for (const char* state : {"", "1", "[]", "{}", R"({"schedules":1})", R"({"schedules":[]})", R"({"schedules":[1]})",
                            R"({"schedules":[{"kind":"none"}]})", R"({"schedules":[{"kind":"constant","decay":2}]})", "\xff"})
    EXPECT_EQ(decay_keys_in({{kStateKey, state}}), Keys()) << state;
}

TEST(EmaFile, NamesKeepWhatEveryFileSystemTakes) {
  EXPECT_EQ(ema_file_name("0.9999"), "ema-0.9999.safetensors");
  EXPECT_EQ(ema_file_name("power(sigma_rel=0.1)"), "ema-power-sigma_rel=0.1.safetensors");
  EXPECT_EQ(ema_file_name("linear(from=0.5,to=1e-05,steps=7)"), "ema-linear-from=0.5-to=1e-05-steps=7.safetensors");
  EXPECT_EQ(ema_file_name("/../x--y(("), "ema-..-x--y.safetensors");
  EXPECT_EQ(ema_file_name("a((b--\xc3\xa9(c"), "ema-a-b---c.safetensors");
  EXPECT_EQ(ema_file_name("((("), "ema-.safetensors");
}

}  // namespace
}  // namespace shardow
