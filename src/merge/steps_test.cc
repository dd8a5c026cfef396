// Which step a checkpoint is of: from its metadata, its path, or not to be known.
#include <gtest/gtest.h>

#include "merge/merging_fixture.h"

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

}  // namespace
}  // namespace shardow
