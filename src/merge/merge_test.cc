// Merges are the inputs' sums, to the last bit the same whatever made them, or they leave everything as it was.
#include "merge/merging_fixture.h"
#include "merge/rules.h"

namespace shardow {
namespace {

class Merge : public Merging {};

TEST_F(Merge, IsTheSumOfAnyLayoutsAndTakesIntegersFromTheNewest) {
  const std::vector<MergeInput> inputs = several(kMixed, 5);
  const MergeReport report = merge(*solo(), inputs, folder_ / "out.safetensors", {.formula = "weights"});
  const Checkpoint out = Checkpoint::open(folder_ / "out.safetensors");
  for (const Spec& spec : kMixed) {
    ASSERT_EQ(out.tensor(spec.name).dtype, spec.dtype);
    if (is_floating(spec.dtype)) {
      expect_sum(inputs, spec.name, whole_of(out, spec.name), spec.dtype);
    } else {
      EXPECT_EQ(whole_of(out, spec.name), whole_of(std::get<Checkpoint>(inputs.back().tensors), spec.name));
    }
  }
  EXPECT_EQ(report.taken, (std::vector<std::string>{"counts", "flags"}));
  EXPECT_EQ(report.averaged.size(), kMixed.size() - 2);
  EXPECT_NEAR(report.sum, 0.3 - 0.25 + 0.52 + 0.63 + 0.74, 1e-12);
  EXPECT_EQ(report.inputs.back().name, "input-4.safetensors");
  EXPECT_NE(out.metadata().at(kMergeKey).find(
                R"("formula":"weights","step":5000,"inputs":[{"name":"input-0.safetensors","step":1000,"coe)"),
            std::string::npos)
      << out.metadata().at(kMergeKey);
  EXPECT_EQ(step_of("out", out.metadata()), 5000);
}

TEST_F(Merge, GivesTheSameBytesWhateverTheOrderThreadsRanksAndLayouts) {
  std::vector<MergeInput> inputs = several(kMixed, 4);
  merge(*solo(), inputs, folder_ / "first.safetensors", {.threads = 1});
  const std::string expected = bytes_of(folder_ / "first.safetensors");
  std::mt19937 random(1);
  for (int ranks : {1, 3}) {
    for (int threads : {1, 4}) {
      std::shuffle(inputs.begin(), inputs.end(), random);
      ASSERT_EQ(on_ranks(ranks,
                         [&](Group& group) {
                           std::vector<MergeInput> mine = inputs;
                           std::rotate(mine.begin(), mine.begin() + group.rank(), mine.end());
                           merge(group, mine, folder_ / "other.safetensors", {.threads = threads});
                         }),
                all(ranks, kFine));
      EXPECT_TRUE(bytes_of(folder_ / "other.safetensors") == expected) << ranks << " ranks, " << threads << " threads";
    }
  }
}

TEST_F(Merge, AddsInTheOrderOfStepsThenOfNames) {
  const auto input = [&](const std::string& name, double value, std::optional<int64_t> step) {
    Held held("w", DType::kF64, Region::whole({1}));
    std::memcpy(held.memory.data(), &value, sizeof value);
    save(*solo(), {{held.view}}, folder_ / name);
    return MergeInput{name, Checkpoint::open(folder_ / name), 1, step};
  };
  const auto sum = [&](const std::vector<MergeInput>& inputs) {
    merge(*solo(), inputs, folder_ / "out.safetensors");
    return value_of(whole_of(Checkpoint::open(folder_ / "out.safetensors"), "w").data(), DType::kF64);
  };
  EXPECT_EQ(sum({input("a", 1, 3), input("b", -1e16, 2), input("c", 1e16, 1)}), 1);     // (1e16 - 1e16) + 1
  EXPECT_EQ(sum({input("c", 1e16, {}), input("b", -1e16, {}), input("a", 1, {})}), 0);  // (1 - 1e16) + 1e16
  EXPECT_EQ(sum({input("a", 1, 7), input("b", -1e16, {}), input("c", 1e16, {})}), 1);   // those without a step first
}

/// Sums of float64 have nowhere to be kept where they are beyond float64 themselves, on the way too.
TEST_F(Merge, SaysWhichSumsAreBeyondFloat64) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const auto input = [&](const std::string& name, std::vector<double> values, double coefficient) {
    values.resize(70'000, 1);  // of several blocks
    std::rotate(values.begin(), values.begin() + 40'000, values.end());
    Held held("w", DType::kF64, Region::whole({70'000}));
    std::memcpy(held.memory.data(), values.data(), held.memory.size());
    save(*solo(), {{held.view}}, folder_ / name);
    return MergeInput{name, Checkpoint::open(folder_ / name), coefficient, {}};
  };
  const std::vector<MergeInput> inputs = {input("a", {1.7e308, -1.7e308, 1.7e308, 1e308, inf, nan, inf}, 2),
                                          input("b", {1, 1, -1.7e308, 1, 1, 1, -inf}, 2), input("c", {}, 1),
                                          input("d", {}, 1), input("e", {}, 1)};
  for (const auto dtype : {std::optional<DType>(), std::optional(DType::kF32)}) {
    expect_error(Code::kInvalidArgument, {"4 of 'w'", "smaller weights"},
                 [&] { merge(*solo(), inputs, folder_ / "out.safetensors", {.dtype = dtype}); });
  }
  EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
  merge(*solo(), {input("a", {inf, nan, 1e308}, 1), input("b", {1, 2, 3}, 1)},
        folder_ / "out.safetensors");  // as they are in an input
}

TEST_F(Merge, CastsOnceAndTakesInputsOfSeveralDtypesWhereOneIsSaid) {
  std::vector<Spec> wide = {{"w", DType::kF32, {4001}}}, narrow = {{"w", DType::kBF16, {4001}}};
  const std::vector<MergeInput> inputs = {saved("a.safetensors", wide, 1, 0.7), saved("b.safetensors", narrow, 2, 0.3)};
  expect_error(Code::kInvalidArgument, {"'w' is F32 in a.safetensors and BF16 in b.safetensors", "which dtype"},
               [&] { merge(*solo(), inputs, folder_ / "out.safetensors"); });
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    merge(*solo(), inputs, folder_ / "out.safetensors", {.dtype = dtype});
    const Checkpoint out = Checkpoint::open(folder_ / "out.safetensors");
    ASSERT_EQ(out.tensor("w").dtype, dtype);
    expect_sum(inputs, "w", whole_of(out, "w"), dtype);
  }
}

/// One float32 tensor that can't be read.
class Unreadable final : public MergeSource {
 public:
  std::vector<std::string> names() const override { return {"w"}; }
  std::pair<DType, Shape> tensor(std::string_view) const override { return {DType::kF32, {4}}; }
  void read(const TensorView&) const override { throw 7; }
};

TEST_F(Merge, RefusesInputsMemoryAndRulesThatAreNone) {
  const std::vector<Spec> specs = {{"w", DType::kF32, {4}}};
  const std::vector<MergeInput> inputs = {saved("a.safetensors", specs, 1, 1, 1),
                                          saved("b.safetensors", specs, 2, 1, 2)};
  const std::vector<TensorView> nowhere = {{"w", DType::kF32, Region::whole({4}), nullptr}};
  expect_error(Code::kInvalidArgument, {"'w' has no memory"}, [&] { load_merged(*solo(), nowhere, inputs); });
  expect_error(Code::kInvalidArgument, {"'w' has no memory"},
               [&] { load(*solo(), nowhere, folder_ / "a.safetensors"); });
  const std::vector<MergeInput> none = {inputs[0], {"none", std::shared_ptr<const MergeSource>(), 1, 3}};
  expect_error(Code::kInvalidArgument, {"none has no source"}, [&] { merge(*solo(), none, folder_ / "out"); });
  for (const int64_t step : {int64_t{-5}, (int64_t{1} << 53) + 1}) {
    std::vector<MergeInput> others = inputs;
    others[0].step = step;
    expect_error(Code::kInvalidArgument, {"steps are 0 to 2^53"}, [&] { merge(*solo(), others, folder_ / "out"); });
  }
  std::vector<MergeInput> weighed = inputs;
  for (const MergeRule& rule : {MergeRule{.kind = MergeRule::Kind::kCurve, .curve = static_cast<DecayCurve>(9)},
                                MergeRule{.kind = static_cast<MergeRule::Kind>(9)}})
    expect_error(Code::kInvalidArgument, {"9 is none"}, [&] { weigh(weighed, rule); });
}

TEST_F(Merge, OfASourceThatThrowsNoExceptionIsAnErrorOnAllRanks) {
  const std::vector<MergeInput> inputs = {{"odd", std::make_shared<Unreadable>(), 1, 1}};
  Held held("w", DType::kF32, Region::whole({4}));
  const std::vector<TensorView> views = {held.view};
  for (const int ranks : {1, 2}) {
    const std::vector<int> failed = all(ranks, static_cast<int>(Code::kPeerFailed));
    EXPECT_EQ(on_ranks(ranks, [&](Group& group) { merge(group, inputs, folder_ / "out.safetensors"); }), failed);
    EXPECT_EQ(on_ranks(ranks, [&](Group& group) { load_merged(group, views, inputs); }), failed);
  }
}

TEST_F(Merge, ListsAllThatDoesNotFitBeforeAnythingIsWritten) {
  std::vector<Spec> other = kMixed;
  other[0].shape = {302, 2111};
  other[6].dtype = DType::kI32;
  other[7].name = "flag";
  const std::vector<MergeInput> inputs = {saved("a.safetensors", kMixed, 1, 0.5, 1), saved("b", other, 2, 0.5, 2)};
  const auto before = names();
  for (const bool check_only : {false, true}) {
    expect_error(Code::kInvalidArgument,
                 {"'embed' has shape [301, 2111] in a.safetensors and [302, 2111] in b",
                  "'counts' is I64 in a.safetensors and I32 in b", "'flags' is missing in b",
                  "'flag' is missing in a.safetensors"},
                 [&] { merge(*solo(), inputs, folder_ / "out", {.check_only = check_only}); });
  }
  const std::vector<Spec> tiny = {{"x", DType::kF8E4M3, {8}}, {"y", DType::kF32, {8}}};
  expect_error(Code::kUnsupported, {"'x' is F8_E4M3"},
               [&] { merge(*solo(), {saved("c.safetensors", tiny, 1, 1)}, folder_ / "out"); });
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

TEST_F(Merge, RefusesNothingZeroAndWhatIsNoNumber) {
  const MergeInput input = saved("a.safetensors", kMixed, 1, 0);
  const auto with = [&](double coefficient) {
    MergeInput one = input;
    one.coefficient = coefficient;
    return one;
  };
  const auto out = folder_ / "out.safetensors";
  expect_error(Code::kInvalidArgument, {"no inputs"}, [&] { merge(*solo(), {}, out); });
  expect_error(Code::kInvalidArgument, {"all inputs are 0"}, [&] { merge(*solo(), {with(0), with(-0.0)}, out); });
  expect_error(Code::kInvalidArgument, {"coefficient nan"}, [&] { merge(*solo(), {with(std::nan(""))}, out); });
  expect_error(Code::kInvalidArgument, {"a.safetensors has the coefficient -1e+308"},
               [&] { merge(*solo(), {with(-1e308)}, out); });
  expect_error(Code::kInvalidArgument, {"dtype I64"}, [&] { merge(*solo(), {with(1)}, out, {.dtype = DType::kI64}); });
  EXPECT_FALSE(fs::exists(out));
}

TEST_F(Merge, OfOneInputIsThatInputAndAnOlderInputWithZeroIsNotRead) {
  const std::vector<Spec> specs = {{"a", DType::kBF16, {70'001}}, {"b", DType::kC64, {5}}};
  MergeInput one = saved("a.safetensors", specs, 3, 1, 2),
             other = saved("b.safetensors", {{"other", DType::kF32, {3}}}, 4, 0, 1);
  merge(*solo(), {one, other}, folder_ / "out.safetensors");
  const Checkpoint out = Checkpoint::open(folder_ / "out.safetensors");
  for (const Spec& spec : specs)
    EXPECT_EQ(whole_of(out, spec.name), whole_of(std::get<Checkpoint>(one.tensors), spec.name));
}

TEST_F(Merge, TakesIntegersFromTheNewestWhateverItsCoefficient) {
  const std::vector<MergeInput> inputs = {saved("a", kMixed, 1, 0.5, 10), saved("b", kMixed, 2, 0.5, 20),
                                          saved("c", kMixed, 3, 0, 30)};
  const MergeReport report = merge(*solo(), inputs, folder_ / "out.safetensors");
  const Checkpoint out = Checkpoint::open(folder_ / "out.safetensors");
  for (const char* name : {"counts", "flags"})
    EXPECT_EQ(whole_of(out, name), whole_of(std::get<Checkpoint>(inputs[2].tensors), name));
  expect_sum({inputs[0], inputs[1]}, "embed", whole_of(out, "embed"), DType::kBF16);
  EXPECT_EQ(report.newest, "c");
  EXPECT_EQ(report.inputs.size(), 3U);
  EXPECT_NE(out.metadata().at(kMergeKey).find(R"("step":30)"), std::string::npos);
  EXPECT_NE(out.metadata().at(kMergeKey).find(R"("newest":"c"})"), std::string::npos);
  int64_t floats = 0, others = 0;
  for (const std::string& name : out.names())
    (is_floating(out.tensor(name).dtype) ? floats : others) += out.tensor(name).bytes;
  EXPECT_EQ(report.bytes_read, 2 * floats + others);
}

TEST_F(Merge, SumsThatBecomeInfiniteAreAnErrorThatCountsThem) {
  const std::vector<Spec> specs = {
      {"fits", DType::kF32, {70'000}}, {"large", DType::kF32, {70'000}}, {"inf", DType::kF32, {2}}};
  std::vector<Held> held = random_tensors(specs, 1);
  const auto at = [&](size_t tensor, size_t i) -> float& {
    return reinterpret_cast<float*>(held[tensor].memory.data())[i];
  };
  at(1, 5) = 65519.99f, at(1, 6) = 65520.0f, at(1, 69'999) = -1e30f;  // the first is rounded to 65504
  at(2, 0) = INFINITY, at(2, 1) = NAN;                                // as they were
  save(*solo(), views_of(held), folder_ / "a.safetensors");
  const auto out = folder_ / "out.safetensors";
  const auto input = [&](double coefficient) {
    return MergeInput{"a", Checkpoint::open(folder_ / "a.safetensors"), coefficient};
  };
  for (const bool verify : {true, false}) {
    for (const int ranks : {1, 3}) {
      EXPECT_EQ(on_ranks(ranks,
                         [&](Group& group) {
                           expect_error(Code::kInvalidArgument, {"2 of 'large'; choose a dtype"}, [&] {
                             merge(group, {input(1)}, out, {.dtype = DType::kF16, .verify = verify});
                           });
                         }),
                all(ranks, kFine));
    }
  }
  expect_error(Code::kInvalidArgument, {"1 of 'large'"}, [&] { merge(*solo(), {input(1e30)}, out); });
  EXPECT_FALSE(fs::exists(out));
  merge(*solo(), {input(1)}, out, {.dtype = DType::kBF16});
  merge(*solo(), {input(0.999)}, out);
  EXPECT_TRUE(std::isinf(value_of(whole_of(Checkpoint::open(out), "inf").data(), DType::kF32)));
  Held half("large", DType::kF16, Region::whole({70'000}));
  expect_error(Code::kInvalidArgument, {"2 of 'large'"},
               [&] { load_merged(*solo(), {{half.view}}, {input(1)}, {.strict = false}); });
}

TEST_F(Merge, FindsBytesThatAreNotWhatWasSavedBeforeItPublishes) {
  saved("a.safetensors", kMixed, 1, 0.5);
  saved("out.safetensors", kMixed, 9, 1);
  const std::string old = bytes_of(folder_ / "out.safetensors");
  {
    std::fstream file(folder_ / "a.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-2000, std::ios::end);
    file.put('\x55');
  }
  const MergeInput damaged{"a", Checkpoint::open(folder_ / "a.safetensors"), 0.5}, fine = saved("b", kMixed, 2, 0.5);
  for (const int ranks : {1, 3}) {
    EXPECT_EQ(on_ranks(ranks,
                       [&](Group& group) {
                         merge(group, {damaged, fine}, folder_ / "out.safetensors");
                       }),
              all(ranks, static_cast<int>(Code::kCorrupt)));
    EXPECT_TRUE(bytes_of(folder_ / "out.safetensors") == old);
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", "b", "out.safetensors"}));
  merge(*solo(), {damaged, fine}, folder_ / "out.safetensors", {.verify = false});
}

TEST_F(Merge, OntoOneOfItsInputsReplacesIt) {
  const std::vector<MergeInput> inputs = {saved("a.safetensors", kMixed, 1, 0.5),
                                          saved("b.safetensors", kMixed, 2, 0.5)};
  merge(*solo(), inputs, folder_ / "out.safetensors");
  merge(*solo(), inputs, folder_ / "a.safetensors");
  EXPECT_TRUE(bytes_of(folder_ / "a.safetensors") == bytes_of(folder_ / "out.safetensors"));
}

TEST_F(Merge, RanksThatAskForOtherThingsAreTold) {
  const std::vector<MergeInput> inputs = {saved("a.safetensors", kMixed, 1, 0.5),
                                          saved("b.safetensors", kMixed, 2, 0.5)};
  const auto codes = on_ranks(3, [&](Group& group) {
    std::vector<MergeInput> mine = inputs;
    if (group.rank() == 1) mine[0].coefficient = 0.25;
    merge(group, mine, folder_ / "out.safetensors");
  });
  EXPECT_EQ(codes, all(3, static_cast<int>(Code::kInvalidArgument)));
}

TEST_F(Merge, IntoTensorsIsWhatAMergeWouldHaveWritten) {
  std::vector<Spec> specs = kMixed;
  const std::vector<MergeInput> inputs = several(specs, 3);
  merge(*solo(), inputs, folder_ / "out.safetensors");
  for (const auto& [name, sharding] : kShardings) {
    const auto codes = on_ranks(3, [&, &sharding = sharding](Group& group) {
      std::vector<Held> expected, held;
      for (const Spec& spec : specs) {
        expected.emplace_back(spec.name, spec.dtype, sharding(spec.shape, group.rank(), 3));
        held.emplace_back(spec.name, spec.dtype, sharding(spec.shape, group.rank(), 3));
      }
      load(group, views_of(expected), folder_ / "out.safetensors");
      const LoadReport report = load_merged(group, views_of(held), inputs);
      for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
      EXPECT_GT(report.bytes_read, 0);
    });
    EXPECT_EQ(codes, all(3, kFine)) << name;
  }
}

TEST_F(Merge, IntoTensorsSaysWhatDoesNotFit) {
  const std::vector<MergeInput> inputs = several(kMixed, 2);
  std::vector<Held> held;
  held.emplace_back("embed", DType::kBF16, Region::whole({2111, 301}));
  held.emplace_back("new", DType::kF32, Region::whole({2}));
  held.emplace_back("counts", DType::kF32, Region::whole({13}));
  expect_error(
      Code::kInvalidArgument,
      {"'embed' has shape [301, 2111] in the inputs and [2111, 301] here", "'counts' is I64 in the inputs and F32 here",
       "missing in the inputs: new", "unexpected in the inputs: "},
      [&] { load_merged(*solo(), views_of(held), inputs); });
}

}  // namespace
}  // namespace shardow
