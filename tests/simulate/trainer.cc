#include "trainer.h"

#include <fmt/format.h>

#include <algorithm>

#include "shardow/ema_file.h"

namespace shardow::simulated {
namespace {

/// An error after which this rank does not go on: of the others, or of something that all should have in common.
struct Stopped {
  std::string why;
};

bool goes_on_after(int code) {
  return code == kFine || code == static_cast<int>(Code::kIo) || code == static_cast<int>(Code::kOutOfSpace);
}

constexpr const char* kNames[] = {"train", "swap", "reset", "load", "save", "async_save", "wait"};

}  // namespace

std::string name_of(const Program& program, int path) {
  if (path == 0) return program.directory ? "weights" : "weights.safetensors";
  return program.job.schedules > 1 ? "averages" : "averages.safetensors";
}

Expected expected(const Program& program, const fs::path& folder) {
  const std::unique_ptr<Group> alone = solo();
  Model model({.schedules = program.job.schedules}, 0, 1, alone.get());
  Average& average = model.average();
  const std::string start = program.job.schedules > 1 ? kStart : std::string(kStart) + ".safetensors";
  shardow::save(*alone, average, folder / start);
  Expected run;
  if (!program.first) {
    SaveOptions options = program.options;
    shardow::save(*alone, model.weights(), folder / name_of(program, 0), options);
    options.max_shard_size = 0;
    shardow::save(*alone, average, folder / name_of(program, 1), options);
    run.saves = {{0, model.weights_now()}, {1, model.averages_now()}};
    for (Saved& one : run.saves) one.told = 0, one.begun = true;
  }
  for (const Op& op : program.ops) {
    switch (op.what) {
      case What::kTrain: model.train(); break;
      case What::kSwap: average.swapped() ? average.swap_out() : average.swap_in(); break;
      case What::kReset: average.reset(); break;
      case What::kLoad: shardow::load(*alone, average, folder / start); break;
      case What::kSave:
      case What::kAsync:
        run.saves.push_back({op.path, op.path == 0 ? model.weights_now() : model.averages_now()});
        break;
      case What::kWait: break;
    }
  }
  run.weights = model.weights_now();
  run.averages = model.averages_now();
  for (Saved& one : run.saves) one.codes.resize(static_cast<size_t>(program.job.ranks));
  return run;
}

std::string Trainer::go(Group& group, std::string& stopped) {
  next_ = program_.first ? 0 : 2;
  struct AtRest {  // also where the rank dies: what its Average does in the background is of this simulation
    Average& average;
    ~AtRest() {
      try {
        average.wait();
      } catch (const Error&) {
      }
    }
  } const at_rest{model_.average()};
  try {
    for (const Op& op : program_.ops) {
      world_.come(kNames[static_cast<size_t>(op.what)]);
      one(group, op);
    }
    settle(0);
    settle(1);
  } catch (const Stopped& why) {
    stopped = why.why;
  } catch (const std::exception& error) {
    stopped = error.what();
  }
  if (!stopped.empty()) {
    simulation_.remember([&] { return fmt::format("rank {} stops: {}", rank_, stopped); });
    for (const UnderWay& last : under_way_) simulation_.join(last.thread);
    world_.leave(rank_);
    return "";
  }
  return model_.differs(run_.weights, run_.averages);
}

void Trainer::one(Group& group, const Op& op) {
  Average& average = model_.average();
  switch (op.what) {
    case What::kTrain:
      if (world_.mutant() == Mutant::kSwapLeaks) settle(0);
      return model_.train();
    case What::kSwap: return average.swapped() ? average.swap_out() : average.swap_in();
    case What::kReset: return average.reset();
    case What::kLoad:
      load(group, average, folder_ / (program_.job.schedules > 1 ? kStart : std::string(kStart) + ".safetensors"),
           {.timeout = program_.options.timeout});
      return;
    case What::kSave: return save(group, next_++);
    case What::kAsync: return save_in_background(next_++);
    case What::kWait: return settle(op.path);
  }
}

std::vector<SaveFile> Trainer::files(Group& group, int path) {
  if (path == 0) return {{"", model_.weights()}};
  return ema_files(group, model_.average(), program_.options.timeout);
}

void Trainer::save(Group& group, size_t save) {
  const int path = run_.saves[save].path;
  settle(path);
  SaveOptions options = program_.options;
  attempt(save, [&] {
    if (path == 0) {
      shardow::save(group, model_.weights(), path_of(path), options);
    } else {
      options.max_shard_size = 0;
      shardow::save(group, model_.average(), path_of(path), options);
    }
    answer(save, kFine);
  });
  check(save);
}

/// Lanes 1 and 2 are those of the two paths; 3 and 4 of saves that overtake.
int Trainer::free_lane(int path) {
  const auto is_free = [&](int lane) {
    return std::none_of(under_way_.begin(), under_way_.end(), [&](const UnderWay& one) { return one.lane == lane; });
  };
  if (world_.mutant() == Mutant::kOvertakes && !is_free(1 + path) && is_free(3 + path)) return 3 + path;
  settle(path);
  return 1 + path;
}

void Trainer::save_in_background(size_t save) {
  const int path = run_.saves[save].path, lane = free_lane(path);
  std::shared_ptr<StagedSave> staged;
  attempt(save, [&] {
    Group& group = world_.group(rank_, lane);
    SaveOptions options = program_.options;
    if (path != 0) options.max_shard_size = 0;
    group.begin("async_save()", options.timeout);
    staged = std::make_shared<StagedSave>(group, files(group, path), path_of(path), options);
    const bool reads_weights = world_.mutant() == Mutant::kStagesLate || world_.mutant() == Mutant::kSwapLeaks;
    if (reads_weights && path == 0) return;
    auto& memory = staging_[world_.mutant() == Mutant::kReusesMemory ? 0 : static_cast<size_t>(lane)];
    memory.resize(std::max<size_t>(memory.size(), 4096));  // more than all tensors have: where it lies does not change
    staged->stage(memory);
  });
  check(save);
  if (!staged) return;
  const int thread = simulation_.start([this, staged, save, lane, &world = world_, rank = rank_]() mutable {
    world.live(
        rank,
        [&](Group&) {
          attempt(save, [&] {
            staged->write();
            answer(save, kFine);
          });
          staged.reset();
        },
        lane);
  });
  under_way_.push_back({thread, lane, save});
}

/// Until the last save to this path has ended.
void Trainer::settle(int path) {
  std::vector<size_t> ended;
  for (size_t i = 0; i < under_way_.size();) {
    if (run_.saves[under_way_[i].save].path != path) {
      ++i;
      continue;
    }
    simulation_.join(under_way_[i].thread);
    ended.push_back(under_way_[i].save);
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (const size_t save : ended) check(save);
}

void Trainer::attempt(size_t save, const std::function<void()>& fn) {
  run_.saves[save].begun = true;
  try {
    fn();
  } catch (const Error& error) {
    simulation_.remember([&] { return fmt::format("rank {}, save {}: {}", rank_, save, error.what()); });
    answer(save, static_cast<int>(error.code()));
  } catch (const std::exception&) {
    answer(save, static_cast<int>(Code::kInternal));
  }
}

void Trainer::answer(size_t save, int code) {
  Saved& one = run_.saves[save];
  one.codes[static_cast<size_t>(rank_)] = code;
  if (code == kFine && !one.told) one.told = world_.recording().calls.size();
}

void Trainer::check(size_t save) const {
  const auto& code = run_.saves[save].codes[static_cast<size_t>(rank_)];
  if (code && !goes_on_after(*code)) throw Stopped{fmt::format("save {} failed", save)};
}

}  // namespace shardow::simulated
