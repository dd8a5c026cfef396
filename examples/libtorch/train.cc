// Trains a small network with LibTorch and keeps two averages of its weights; stops and goes on from its last
// checkpoint, bit for bit.
//
//   train OUT STEPS      OUT/checkpoint: all that a run goes on from; OUT/model.safetensors: the averages, for
//   inference
#include <shardow/average.h>
#include <shardow/checkpoint.h>
#include <shardow/ema_file.h>
#include <shardow/error.h>
#include <shardow/libtorch.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>

namespace fs = std::filesystem;
namespace lt = shardow::libtorch;

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 16, 3).padding(1)};
  torch::nn::BatchNorm2d norm{16};
  torch::nn::Linear head{16 * 4 * 4, 10};

  NetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
  }

  torch::Tensor forward(const torch::Tensor& images) {
    return head(torch::max_pool2d(torch::relu(norm(conv(images))), 2).flatten(1));
  }
};
TORCH_MODULE(Net);

struct Batch {
  torch::Tensor images, labels;
};

/// Ten pictures under noise, drawn by `seed` alone: a run that goes on sees what it would have seen.
Batch draw(uint64_t seed, int64_t count) {
  torch::manual_seed(1);
  const torch::Tensor pictures = torch::randn({10, 1, 8, 8});
  torch::manual_seed(seed);
  const torch::Tensor labels = torch::randint(10, {count});
  return {pictures.index_select(0, labels) + 2 * torch::randn({count, 1, 8, 8}), labels};
}

double accuracy(Net& net) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const Batch held_out = draw(1'000'000, 2000);
  const double right = net(held_out.images).argmax(1).eq(held_out.labels).to(torch::kFloat64).mean().item<double>();
  net->train();
  return right;
}

/// SGD's momentum by the weights' names. It begins with zeros, as if it had been there.
torch::OrderedDict<std::string, torch::Tensor> momentum_of(Net& net, torch::optim::SGD& optimizer) {
  torch::OrderedDict<std::string, torch::Tensor> all;
  for (const auto& weight : net->named_parameters()) {
    auto& state = optimizer.state()[weight.value().unsafeGetTensorImpl()];
    if (!state) {
      auto begun = std::make_unique<torch::optim::SGDParamState>();
      begun->momentum_buffer(torch::zeros_like(weight.value()));
      state = std::move(begun);
    }
    all.insert(weight.key(), static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer());
  }
  return all;
}

/// False where there is nothing to go on from; whatever else is wrong is thrown.
bool resume(shardow::Group& group, shardow::Average& ema, const std::vector<shardow::TensorView>& model,
            const std::vector<shardow::TensorView>& momentum, const fs::path& checkpoint) {
  try {
    shardow::load(group, ema, checkpoint);
  } catch (const shardow::Error& error) {
    if (error.code() != shardow::Code::kNotFound) throw;
    return false;
  }
  shardow::load(group, model, checkpoint / "model.safetensors");
  shardow::load(group, momentum, checkpoint / "momentum.safetensors");
  return true;
}

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "train OUT STEPS\n"), 2;
  const fs::path out = argv[1], checkpoint = out / "checkpoint";
  const int64_t steps = std::stoll(argv[2]);
  const auto group = shardow::solo();

  torch::manual_seed(0);
  Net net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  shardow::Average ema(lt::parameters(*net),
                       {.schedules = {shardow::Schedule::warmup(0.95), shardow::Schedule::constant(0.8)}});
  const std::vector<shardow::TensorView> model = lt::state(*net), momentum = lt::views(momentum_of(net, optimizer));

  if (resume(*group, ema, model, momentum, checkpoint)) lt::written(*net);
  for (int64_t step = ema.stats().step + 1; step <= steps; ++step) {
    const Batch batch = draw(static_cast<uint64_t>(step) + 1, 32);
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(net(batch.images), batch.labels).backward();
    optimizer.step();
    ema.update();
    if (step % 20 == 0 ||
        step == steps) {  // one directory, whole or not there: averages, weights and momentum of one step
      std::vector<shardow::SaveFile> files = shardow::ema_files(*group, ema);
      files.push_back({"model.safetensors", model});
      files.push_back({"momentum.safetensors", momentum});
      shardow::save(*group, files, checkpoint);
    }
  }

  std::printf("{\"weights\": %.4f", accuracy(net));
  for (size_t k = 0; k < ema.size(); ++k) {
    const lt::Swapped swapped(*net, ema, k);
    std::printf(", \"%s\": %.4f", ema.schedules()[k].key().c_str(), accuracy(net));
  }
  std::printf("}\n");
  shardow::save(*group, lt::state(*net, ema.views(0)), out / "model.safetensors");  // batch statistics are the weights'
}
