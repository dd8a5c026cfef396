// A trainer in plain C++ on MPI ranks, with averages: mpirun -n 2 trainer digits.bin run
//
// Each rank holds some rows of every tensor, and their averages. Two decays are kept in one pass. A run that was
// stopped or killed goes on from its last checkpoint, on any number of ranks, and ends with the very bits of a run that
// was not.
#include <shardow/average.h>
#include <shardow/ema_file.h>
#include <shardow/error.h>
#include <shardow/mpi.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "network.h"

namespace {

constexpr int kSteps = 300, kSaveEvery = 50, kBatch = 64, kHeldOut = 297;

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
    if (group.rank() == 0) std::printf("a new start: %s\n", error.what());
    return;
  }
  shardow::load(group, training, run + "/training.safetensors");
}

void train(const std::string& data, const std::string& run, int until, int die_at) {
  const std::unique_ptr<shardow::Group> group = shardow::mpi(MPI_COMM_WORLD);
  const std::vector<Sample> samples = read_samples(data);
  const int num_train = static_cast<int>(samples.size()) - kHeldOut;
  const Sample* const held_out = samples.data() + num_train;
  Network network(MPI_COMM_WORLD);

  const auto weights = views_of(network.tensors(), &Rows::values);
  auto training = views_of(network.tensors(), &Rows::momentum, ".momentum");
  training.insert(training.end(), weights.begin(), weights.end());
  shardow::Average ema(weights, {.schedules = {shardow::Schedule::constant(0.9), shardow::Schedule::constant(0.99)}});

  resume(*group, ema, training, run);
  for (int64_t step = ema.stats().step + 1; step <= until; ++step) {
    const int64_t begin = (step - 1) * kBatch % (num_train - kBatch);
    network.train(samples.data() + begin, kBatch, 0.05f);
    ema.update(step);
    if (step % kSaveEvery == 0 || step == until) save(*group, ema, training, run, step == die_at);
  }

  const double plain = network.accuracy(held_out, kHeldOut);
  for (size_t k = 0; k < ema.size(); ++k) {
    ema.swap_in(k);  // the averages are the weights now, and back, bit for bit
    const double averaged = network.accuracy(held_out, kHeldOut);
    ema.swap_out();
    if (group->rank() == 0)
      std::printf("step %lld on %d ranks: accuracy %.4f, of averages (%s) %.4f\n",
                  static_cast<long long>(ema.stats().step), group->size(), plain, ema.schedules()[k].key().c_str(),
                  averaged);
  }
}

}  // namespace

/// trainer DATA RUN [--until STEP] [--die-while-saving STEP]
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int until = kSteps, die_at = 0;
  for (int i = 3; i + 1 < argc; i += 2) (std::string(argv[i]) == "--until" ? until : die_at) = std::atoi(argv[i + 1]);
  try {
    if (argc < 3) throw std::runtime_error("trainer DATA RUN [--until STEP] [--die-while-saving STEP]");
    train(argv[1], argv[2], until, die_at);
  } catch (const std::exception& error) {  // of a collective call every rank has one
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
