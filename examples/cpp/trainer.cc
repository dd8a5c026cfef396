// The training of each rank; on_threads.cc and on_processes.cc make its Group.
//
// Each rank holds some rows of every tensor, and their averages. Two decays are kept in one pass. A run that was
// stopped or killed goes on from its last checkpoint, on any number of ranks, and ends with the very bits of a run that
// was not.
#include "trainer.h"

#include <shardow/average.h>
#include <shardow/ema_file.h>
#include <shardow/error.h>

#include <csignal>
#include <cstdio>
#include <map>
#include <stdexcept>

#include "network.h"

namespace {

constexpr int kSaveEvery = 50, kBatch = 64, kHeldOut = 297;

/// What the engine is told of this rank's part of the tensors: name, type, which elements of the whole, and where they
/// are.
std::vector<shardow::TensorView> views_of(std::vector<Rows>& tensors, std::vector<float> Rows::*memory,
                                          const std::string& suffix = "") {
  std::vector<shardow::TensorView> views;
  for (Rows& one : tensors) {
    const auto whole = shardow::Region::whole({one.rows, one.columns});
    const auto mine = whole.window(one.begin * one.columns, one.end * one.columns);
    views.push_back({one.name + suffix, shardow::DType::kF32, mine, (one.*memory).data()});
  }
  return views;
}

/// Weights, momentum and averages, which appear together or not at all.
void save(shardow::Group& group, const shardow::Average& ema, std::vector<shardow::TensorView> training,
          const std::string& run, bool die) {
  std::vector<shardow::SaveFile> files = shardow::ema_files(group, ema);
  files.push_back({"training.safetensors", std::move(training)});
  shardow::SaveOptions options;
  if (die) options.progress = [](int64_t, int64_t) { std::raise(SIGKILL); };  // in the middle of it, on rank 0
  shardow::save(group, files, run, options);
}

/// Weights, momentum and averages of the last checkpoint, where there is one. Each rank reads its own rows, whoever
/// wrote them.
void resume(shardow::Group& group, shardow::Average& ema, const std::vector<shardow::TensorView>& training,
            const std::string& run) {
  try {
    shardow::load(group, ema, run);
  } catch (const shardow::Error& error) {
    if (error.code() != shardow::Code::kNotFound) throw;  // on every rank, or on none
    if (group.rank() == 0) std::fprintf(stderr, "a new start: %s\n", error.what());
    return;
  }
  shardow::load(group, training, run + "/training.safetensors");
}

}  // namespace

void train(shardow::Group& group, const Options& options) {
  const std::vector<Sample> samples = read_samples(options.data);
  const int num_train = static_cast<int>(samples.size()) - kHeldOut;
  const Sample* const held_out = samples.data() + num_train;
  Network network(group);

  const auto weights = views_of(network.tensors(), &Rows::values);
  auto training = views_of(network.tensors(), &Rows::momentum, ".momentum");
  training.insert(training.end(), weights.begin(), weights.end());
  shardow::Average ema(weights, {.schedules = {shardow::Schedule::constant(0.9), shardow::Schedule::constant(0.99)}});

  resume(group, ema, training, options.run);
  for (int64_t step = ema.stats().step + 1; step <= options.until; ++step) {
    const int64_t begin = (step - 1) * kBatch % (num_train - kBatch);
    network.train(samples.data() + begin, kBatch, 0.05f);
    ema.update(step);
    if (step % kSaveEvery == 0 || step == options.until)
      save(group, ema, training, options.run, step == options.die_at);
  }

  const double plain = network.accuracy(held_out, kHeldOut);
  for (size_t k = 0; k < ema.size(); ++k) {
    ema.swap_in(k);  // the averages are the weights now, and back, bit for bit
    const double averaged = network.accuracy(held_out, kHeldOut);
    ema.swap_out();
    if (group.rank() == 0)
      std::printf("step %lld on %d ranks: accuracy %.4f, of averages (%s) %.4f\n",
                  static_cast<long long>(ema.stats().step), group.size(), plain, ema.schedules()[k].key().c_str(),
                  averaged);
  }
}

Options parse(int argc, char** argv) {
  Options options;
  if (argc < 3 || argc % 2 == 0)
    throw std::runtime_error("DATA RUN [--ranks N] [--until STEP] [--die-while-saving STEP]");
  const std::map<std::string, int*> flags = {
      {"--ranks", &options.ranks}, {"--until", &options.until}, {"--die-while-saving", &options.die_at}};
  options.data = argv[1];
  options.run = argv[2];
  for (int i = 3; i < argc; i += 2) {
    const auto flag = flags.find(argv[i]);
    if (flag == flags.end()) throw std::runtime_error(std::string(argv[i]) + " is no option");
    *flag->second = std::stoi(argv[i + 1]);
  }
  return options;
}
