// Which step a checkpoint is of: from its metadata, its path, or not to be known.
#include <gtest/gtest.h>

#include "merge/merging_fixture.h"
#include "merge/rules.h"

namespace shardow {
namespace {

TEST(Steps, AreReadFromPaths) {
  const std::vector<std::pair<const char*, std::optional<int64_t>>> cases = {
      {"run/step-000000100", 100},
      {"run/step-100/model.safetensors", 100},
      {"step-100/ema/model.safetensors", 100},
      {"checkpoint-500", 500},
      {"checkpoint-500/", 500},
      {"global_step1000", 1000},
      {"ckpt_12_step_000340.safetensors", 340},
      {"iter_0000100", 100},
      {"run/2500", 2500},
      {"run/2500/", 2500},
      {"run/2500.safetensors", 2500},
      {"/data/2024/model.safetensors", {}},
      {"2024/step-7/model.safetensors", 7},
      {"2024/final", {}},
      {"Step=7", 7},
      {"llama-7b", {}},
      {"model.safetensors", {}},
      {"v1.5", {}},
      {"run2/model-00001-of-00002.safetensors", {}},
      {"step-99999999999999999999", {}},
      {"", {}},
      {"/", {}},
  };
  for (const auto& [path, step] : cases) EXPECT_EQ(step_of(path), step) << path;
}

TEST(Steps, AreReadFromMetadataFirst) {
  EXPECT_EQ(step_of("step-5", {{"shardow.state", R"({"format":2,"step":70})"}}), 70);
  EXPECT_EQ(step_of("step-5", {{"shardow.merge", R"({"step":80})"}, {"step", "3"}}), 80);
  EXPECT_EQ(step_of("x", {{"shardow.step", "90"}}), 90);
  EXPECT_EQ(step_of("x", {{"global_step", "91"}}), 91);
  for (const char* broken : {"", "[", "{}", R"({"step":-1})", R"({"step":"7"})", "7"})
    EXPECT_EQ(step_of("step-5", {{"shardow.state", broken}, {"step", "-7"}}), 5) << broken;
}

class StepsOfInputs : public Merging {};

TEST_F(StepsOfInputs, SortThemOrAreMissing) {
  const Checkpoint any = std::get<Checkpoint>(saved("a.safetensors", {{"w", DType::kF32, {2}}}, 1, 1).tensors);
  std::vector<MergeInput> inputs = {{"b", any, 1, 20}, {"c", any, 1, 10}, {"a", any, 1, 10}};
  EXPECT_TRUE(sort_by_step(inputs));
  EXPECT_EQ(inputs[0].name + inputs[1].name + inputs[2].name, "acb");
  expect_error(Code::kInvalidArgument, {"a and c are both of step 10"}, [&] { steps_of(inputs); });
  inputs[1].step = 15;
  EXPECT_EQ(steps_of(inputs), (std::vector<int64_t>{10, 15, 20}));
  inputs[0].step.reset();
  inputs[1].step.reset();
  EXPECT_FALSE(sort_by_step(inputs));
  EXPECT_EQ(inputs[0].name, "a");
  expect_error(Code::kInvalidArgument, {"are not known: a, c;"}, [&] { steps_of(inputs); });
}

using Kind = MergeRule::Kind;

std::string names_of(const std::vector<MergeInput>& inputs) {
  std::string names;
  for (const MergeInput& input : inputs) names += input.name;
  return names;
}

TEST_F(StepsOfInputs, AreAskedForWhereTheOrderIsPartOfTheRule) {
  const Checkpoint any = std::get<Checkpoint>(saved("a.safetensors", {{"w", DType::kF32, {2}}}, 1, 1).tensors);
  const std::vector<MergeInput> none = {{"c", any}, {"a", any}, {"b", any}};
  std::vector<MergeInput> some = none, all = none, twice = none;
  some[0].step = 30;
  for (size_t j = 0; j < 3; ++j) all[j].step = 30 - 10 * static_cast<int64_t>(j), twice[j].step = 5;
  const MergeRule ema{.kind = Kind::kEma, .decay = 0.5}, each{.kind = Kind::kEma, .decay = 0.5, .per_step = true};
  const MergeRule lawa{.kind = Kind::kLawa, .last = 2}, curve{.kind = Kind::kCurve}, mean{},
      given{Kind::kWeights, {1, 2, 3}};
  const auto order = [](std::vector<MergeInput> inputs, const MergeRule& rule) {
    return weigh(inputs, rule), names_of(inputs);
  };
  EXPECT_EQ(order(none, ema), "cab");  // as they are given, where nobody knows better
  for (const MergeRule& rule : {ema, each, lawa, curve, mean}) EXPECT_EQ(order(all, rule), "bac");
  for (const MergeRule& rule : {mean, given}) EXPECT_EQ(order(none, rule), "cab");
  EXPECT_EQ(order(all, given), "cab");
  for (const MergeRule& rule : {ema, each, lawa, curve}) {
    for (const bool partly : {true, false}) {
      if (!partly && rule.kind == Kind::kEma && !rule.per_step) continue;
      std::vector<MergeInput> inputs = partly ? some : none;
      expect_error(Code::kInvalidArgument,
                   {partly ? "are not known: a, b; give the steps of all inputs" : "are not known: c, a, b;"},
                   [&] { weigh(inputs, rule); });
    }
    expect_error(Code::kInvalidArgument, {"both of step 5"}, [&] { order(twice, rule); });
  }
  for (const MergeRule& rule : {mean, given}) EXPECT_NO_THROW(order(some, rule));
  expect_error(Code::kInvalidArgument, {"2 weights for 3 inputs"}, [&] { order(none, {Kind::kWeights, {1, 2}}); });
}

TEST_F(StepsOfInputs, SayWhichIsTheNewest) {
  const Checkpoint any = std::get<Checkpoint>(saved("a.safetensors", {{"w", DType::kF32, {2}}}, 1, 1).tensors);
  std::vector<MergeInput> inputs = {{"c", any}, {"d", any}, {"b", any}};
  EXPECT_EQ(newest_of(inputs), 1U);  // by name
  weigh(inputs, {.kind = Kind::kEma, .decay = 0.5});
  EXPECT_EQ(newest_of(inputs), 2U);  // the last of an order that is given
  inputs = {{"c", any, 0, 10}, {"d", any, 0, 5}, {"b", any, 0, 10}};
  EXPECT_EQ(newest_of(inputs), 0U);
  inputs[1].step.reset();
  EXPECT_EQ(newest_of(inputs), 0U);  // a step is later than none
  EXPECT_THROW(newest_of({}), Error);
}

}  // namespace
}  // namespace shardow
