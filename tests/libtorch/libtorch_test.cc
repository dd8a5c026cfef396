// The header first, and twice: it needs nothing before it.
#include <shardow/libtorch.h>
// clang-format off
#include <shardow/libtorch.h>
// clang-format on

#include <gtest/gtest.h>
#include <shardow/average.h>
#include <shardow/checkpoint.h>
#include <shardow/error.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "group/ranks.h"
#include "group_checks.h"

namespace shardow::libtorch {
namespace {

using Names = std::vector<std::string>;

struct Caught {
  bool thrown = false;
  Code code = Code::kInternal;
  std::string message;
};

template <typename Fn>
Caught caught(const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return {true, error.code(), error.what()};
  }
  return {};
}

Deadline far() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(2);
}

Names names(const std::vector<TensorView>& views) {
  Names all;
  for (const TensorView& one : views) all.push_back(one.name);
  return all;
}

struct Block : torch::nn::Module {
  torch::nn::Linear in{3, 4}, out{4, 3};
  torch::nn::BatchNorm1d norm{3};
  Block() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
    register_parameter("tied", in->weight);
    register_parameter("empty", torch::empty({0, 5}));
    register_parameter("frozen", torch::ones({2}), false);
  }
};

TEST(Views, HaveTheNamesOfAStateDictAndTiedWeightsOnce) {
  const Block block;
  EXPECT_EQ(names(parameters(block)),
            (Names{"tied", "empty", "in.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"}));
  EXPECT_EQ(names(parameters(block, Params::kAll)).size(), 8u);
  EXPECT_EQ(names(buffers(block)), (Names{"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}));
  std::map<std::string, std::string> others;
  EXPECT_EQ(state(block, {}, nullptr, &others).size(), 11u);
  EXPECT_EQ(others, (std::map<std::string, std::string>{{"in.weight", "tied"}}));
}

TEST(Views, DescribeTheModulesOwnMemory) {
  const Block block;
  const TensorView weight = parameters(block)[0], tracked = buffers(block)[2], empty = parameters(block)[1];
  EXPECT_EQ(weight.data, block.in->weight.data_ptr());
  EXPECT_EQ(weight.region, Region::whole({4, 3}));
  EXPECT_EQ(weight.device.kind, Device::Kind::kCpu);
  EXPECT_EQ(tracked.dtype, DType::kI64);
  EXPECT_EQ(tracked.region, Region::whole({}));
  EXPECT_EQ(empty.region.size(), 0);
}

TEST(Views, KnowEveryElementTypeThatFilesHave) {
  const std::vector<std::pair<at::ScalarType, DType>> types = {{at::kBool, DType::kBool},
                                                               {at::kByte, DType::kU8},
                                                               {at::kChar, DType::kI8},
                                                               {at::kShort, DType::kI16},
                                                               {at::kUInt16, DType::kU16},
                                                               {at::kInt, DType::kI32},
                                                               {at::kUInt32, DType::kU32},
                                                               {at::kLong, DType::kI64},
                                                               {at::kUInt64, DType::kU64},
                                                               {at::kHalf, DType::kF16},
                                                               {at::kBFloat16, DType::kBF16},
                                                               {at::kFloat, DType::kF32},
                                                               {at::kDouble, DType::kF64},
                                                               {at::kComplexFloat, DType::kC64},
                                                               {at::kFloat8_e5m2, DType::kF8E5M2},
                                                               {at::kFloat8_e4m3fn, DType::kF8E4M3},
                                                               {at::kFloat8_e5m2fnuz, DType::kF8E5M2Fnuz},
                                                               {at::kFloat8_e4m3fnuz, DType::kF8E4M3Fnuz}};
  for (const auto& [type, dtype] : types) EXPECT_EQ(view("t", torch::empty({2}, type)).dtype, dtype) << type;
}

TEST(Views, OfWhatTheyCannotDescribeAreRefusedByName) {
  const at::Tensor plain = torch::ones({2, 3});
  const std::vector<std::pair<at::Tensor, std::string>> refused = {
      {plain.t(), "row-major"},
      {torch::ones({1, 2, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast), "row-major"},
      {plain.to_sparse(), "Sparse"},
      {torch::empty({2}, at::kComplexDouble), "ComplexDouble"},
      {torch::empty({2}, at::device(at::kMeta)), "meta"},
      {torch::ones({2}, at::kComplexFloat).conj(), "row-major"},
      {at::Tensor(), "undefined"},
  };
  for (const auto& [tensor, why] : refused) {
    const auto got = caught([&] { view("layer.weight", tensor); });
    EXPECT_TRUE(got.thrown) << why;
    EXPECT_NE(got.message.find("'layer.weight'"), std::string::npos) << got.message;
    EXPECT_NE(got.message.find(why), std::string::npos) << got.message;
  }
  const auto got = caught([&] { view("part", plain, Region::whole({4, 3}).part(0, 4, 1)); });
  EXPECT_EQ(got.code, Code::kInvalidArgument);
  EXPECT_NE(got.message.find("'part' has 6 elements"), std::string::npos) << got.message;
}

TEST(Views, ThatOverlapAreRefusedAndNamed) {
  const at::Tensor memory = torch::zeros({10});
  const auto refused = [&](const at::Tensor& one, const at::Tensor& other) {
    torch::OrderedDict<std::string, at::Tensor> both;
    both.insert("one", one);
    both.insert("other", other);
    return caught([&] { views(both); });
  };
  for (const auto& got :
       {refused(memory.slice(0, 0, 6), memory.slice(0, 5)), refused(memory.slice(0, 5), memory.slice(0, 0, 6)),
        refused(memory, memory.view({2, 5})), refused(memory, memory.slice(0, 0, 5))}) {
    EXPECT_EQ(got.code, Code::kUnsupported);
    EXPECT_NE(got.message.find("'one'"), std::string::npos);
    EXPECT_NE(got.message.find("'other'"), std::string::npos);
  }
  EXPECT_FALSE(refused(memory.slice(0, 0, 5), memory.slice(0, 5)).thrown);
  EXPECT_FALSE(refused(memory.slice(0, 0, 0), memory).thrown);
  EXPECT_FALSE(refused(memory, memory.slice(0, 0, 0)).thrown);
}

TEST(Views, OfAnExportHaveAveragesInPlaceOfTheirWeights) {
  const Block block;
  Average ema(parameters(block), {.schedules = {Schedule::constant(0.5)}});
  const std::vector<TensorView> whole = state(block, ema.views());
  EXPECT_EQ(whole[0].data, ema.views()[0].data);
  EXPECT_EQ(whole[2].data, block.named_parameters()["frozen"].data_ptr());
  const std::vector<TensorView> foreign = {view("elsewhere", torch::ones({1}))};
  EXPECT_NE(caught([&] { state(block, foreign); }).message.find("'elsewhere'"), std::string::npos);
}

TEST(Written, MakesABackwardThroughOldValuesAnError) {
  torch::nn::Linear layer(2, 1);
  Average ema(parameters(*layer), {.schedules = {Schedule::constant(0.5)}});
  for (const bool told : {false, true}) {
    at::Tensor x = torch::ones({1, 2}, at::requires_grad());
    const at::Tensor loss = layer(x).sum();
    ema.swap_in();
    if (told) written(*layer);
    if (told) {
      EXPECT_THROW(loss.backward(), c10::Error);
    } else {
      EXPECT_NO_THROW(loss.backward());
    }
    ema.swap_out();
  }
}

TEST(SwappedModule, HasTheAveragesInsideAndItsWeightsAfterwardsAndAutogradIsTold) {
  torch::nn::Linear layer(2, 1);
  const auto fill = [&](float value) {
    const torch::NoGradGuard no_grad;
    layer->weight.fill_(value);
  };
  fill(1);
  Average ema(parameters(*layer), {.schedules = {Schedule::constant(0.5)}});
  fill(3);
  ema.update();
  const at::Tensor weights = layer->weight.detach().clone(), x = torch::ones({1, 2}, at::requires_grad());
  const at::Tensor before = layer(x).sum();
  at::Tensor inside;
  {
    const Swapped swapped(*layer, ema);
    EXPECT_TRUE(ema.swapped());
    EXPECT_TRUE(layer->weight.equal(torch::full_like(weights, 2)));
    EXPECT_THROW(before.backward(), c10::Error);
    inside = layer(x).sum();
  }
  EXPECT_FALSE(ema.swapped());
  EXPECT_TRUE(layer->weight.equal(weights));
  EXPECT_THROW(inside.backward(), c10::Error);
}

// --- both libraries at work in one process

TEST(Together, AveragesOnTorchsThreadsAreTorchsLerp) {
  torch::nn::Linear layer(1 << 11, 1 << 10);  // enough for several threads
  const at::Tensor expected = layer->weight.detach().clone();
  Average ema(parameters(*layer), {.schedules = {Schedule::constant(0.875)}, .num_threads = 2});
  for (int step = 0; step < 3; ++step) {
    const torch::NoGradGuard no_grad;
    layer->weight.add_(torch::randn_like(layer->weight));
    expected.lerp_(layer->weight, 0.125);
    ema.update();
  }
  EXPECT_TRUE(torch::from_blob(ema.views()[0].data, layer->weight.sizes()).equal(expected));
}

TEST(Together, BothFormatAndThrowTheirErrors) {
  EXPECT_THROW(torch::ones({2}) + torch::ones({3}), c10::Error);
  EXPECT_EQ(caught([] { Checkpoint::open("/there/is/no.safetensors"); }).code, Code::kNotFound);
  EXPECT_THROW(torch::ones({2}).view({3}), c10::Error);
}

// --- groups

using Stores = std::vector<c10::intrusive_ptr<c10d::Store>>;

Stores in_memory(int n) {
  return Stores(static_cast<size_t>(n), c10::make_intrusive<c10d::HashStore>());
}

Stores in_a_file(int n) {
  const std::string path = testing::TempDir() + "store" + std::to_string(n);
  std::filesystem::remove(path);
  Stores stores;
  for (int rank = 0; rank < n; ++rank) stores.push_back(c10::make_intrusive<c10d::FileStore>(path, n));
  return stores;
}

Stores over_tcp(int n) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto first = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  options.isServer = false;
  options.port = first->getPort();
  Stores stores = {first};
  while (stores.size() < static_cast<size_t>(n))
    stores.push_back(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
  return stores;
}

struct Kind {
  const char* name;
  Stores (*make)(int);
};

class C10dGroup : public testing::TestWithParam<Kind> {};

TEST_P(C10dGroup, Conforms) {
  for (const int n : {1, 2, 3}) {
    const Stores stores = GetParam().make(n);
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < n; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto ours = group(stores[static_cast<size_t>(rank)], rank, n);
        for (const GroupCheck& check : group_checks()) {
          for (const std::string& wrong : check.run(*ours))
            ADD_FAILURE() << check.name << ", rank " << rank << " of " << n << ": " << wrong;
        }
        ours->all_gather("", far());  // nobody leaves before the others are through
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, C10dGroup,
                         testing::Values(Kind{"memory", in_memory}, Kind{"file", in_a_file}, Kind{"tcp", over_tcp}),
                         [](const auto& test) { return test.param.name; });

TEST(C10dGroupOverTcp, MovesLongBlocksAndSaysWhenItsStoreIsGone) {
  Stores stores = over_tcp(2);
  auto group_1 = group(stores[1], 1, 2);
  {
    const auto group_0 = group(std::exchange(stores[0], {}), 0, 2);
    std::jthread sender(
        [&] { group::ranks_of(*group_0).send(std::vector<std::byte>(size_t{9} << 20, std::byte{7}), 1, far()); });
    std::vector<std::byte> bytes(size_t{9} << 20);
    group::ranks_of(*group_1).recv(bytes, 0, far());
    EXPECT_EQ(bytes.front(), std::byte{7});
    EXPECT_EQ(bytes.back(), std::byte{7});
  }
  EXPECT_EQ(caught([&] { group_1->all_gather("", far()); }).code, Code::kPeerFailed);
}

}  // namespace
}  // namespace shardow::libtorch
