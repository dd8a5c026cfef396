#include "training_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "seams.h"

namespace shardow::simulated {
namespace {

constexpr milliseconds kTimeout{60'000};
constexpr int kPaths = 2;

/// Which of the saves to `path`, of those from `first` on that somebody has begun, is there.
std::string wrong_content(const Program& program, const Expected& run, const fs::path& folder, int path, size_t first,
                          bool may_be_none) {
  Content found;
  try {
    found = content_of(folder / name_of(program, path), path == 0 ? 1 : program.job.schedules);
  } catch (const Error& error) {
    if (may_be_none && error.code() == Code::kNotFound) return "";
    return fmt::format("a reader of {} finds: {}", name_of(program, path), error.what());
  }
  for (size_t i = 0; i < run.saves.size(); ++i) {
    if (run.saves[i].path != path || run.saves[i].content != found) continue;
    if (i >= first && run.saves[i].begun) return "";
  }
  const bool is_one = std::any_of(run.saves.begin(), run.saves.end(),
                                  [&](const Saved& one) { return one.path == path && one.content == found; });
  return fmt::format(
      "a reader of {} finds {}", name_of(program, path),
      is_one ? fmt::format("an older save than {}, or one that nobody made", first) : "what is of no step");
}

/// The last save to `path` of which somebody was told when so many calls of the disk were made.
std::optional<size_t> told_by(const Expected& run, int path, size_t calls) {
  std::optional<size_t> last;
  for (size_t i = 0; i < run.saves.size(); ++i) {
    if (run.saves[i].path == path && run.saves[i].told && *run.saves[i].told <= calls) last = i;
  }
  return last;
}

std::string wrong_contents(const Program& program, const Expected& run, const fs::path& folder, size_t calls) {
  for (int path = 0; path < kPaths; ++path) {
    const auto told = told_by(run, path, calls);
    const std::string wrong = wrong_content(program, run, folder, path, told.value_or(0), !told);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

/// All of a job that lived to the end were told alike.
std::string wrong_verdicts(const World& world, const Program& program, const Expected& run) {
  for (size_t i = 0; i < run.saves.size(); ++i) {
    if (i < (program.first ? 0 : kPaths)) continue;
    std::set<bool> fine;
    for (int rank = 0; rank < program.job.ranks; ++rank) {
      if (!world.died(rank)) fine.insert(run.saves[i].codes[static_cast<size_t>(rank)] == kFine);
    }
    if (fine.size() > 1) return fmt::format("of save {} some ranks were told that all is well, and others not", i);
  }
  return "";
}

std::string what_lies_there(const Program& program, const fs::path& folder) {
  std::string more;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name != name_of(program, 0) && name != name_of(program, 1) && !name.starts_with(kStart)) more += " " + name;
  }
  for (int path = 0; path < kPaths; ++path) more += versions::strays(folder / name_of(program, path), {});
  return more;
}

size_t descriptors() {
  return static_cast<size_t>(std::distance(fs::directory_iterator("/proc/self/fd"), {}));
}

/// After whatever happened, the next saves to both paths work and clean up.
std::string after_the_next_saves(uint64_t seed, Program program, Mutant mutant, const fs::path& folder,
                                 std::string* story) {
  program.first = true;
  program.ops = {{What::kTrain}, {What::kAsync, 0}, {What::kSave, 1}};
  Simulation simulation(~seed, story != nullptr);  // with other names for its files
  std::string wrong = wrong_with_program(simulation, program, {{}, mutant}, folder);
  if (story != nullptr) *story += "\n\nthe next saves:\n" + simulation.story();
  if (!wrong.empty()) return "the next saves: " + wrong;
  const std::string left = what_lies_there(program, folder);
  return left.empty() ? "" : "the next saves leave" + left;
}

/// Ends with the weights where they belong.
std::vector<Op> some_ops(Simulation& seed) {
  std::vector<Op> ops;
  bool swapped = false;
  for (int left = 4 + seed.below(8); left > 0; --left) {
    const Op of_either{seed.chance(4) ? What::kSave : What::kAsync, swapped ? 0 : seed.below(kPaths)};
    switch (seed.below(swapped ? 5 : 9)) {
      case 0: ops.push_back({What::kWait, seed.below(kPaths)}); break;
      case 1:
        ops.push_back({What::kSwap});
        swapped = !swapped;
        break;
      case 5: ops.push_back({seed.chance(2) ? What::kReset : What::kLoad}); break;
      case 6:
      case 7: ops.push_back({What::kTrain}); break;
      default: ops.push_back(of_either);
    }
  }
  if (swapped) ops.push_back({What::kSwap});
  return ops;
}

Program some_program(Simulation& seed) {
  Program program;
  program.job.ranks = 1 + seed.below(3);
  program.job.sharding = static_cast<size_t>(seed.below(static_cast<int>(kShardings.size())));
  program.job.replicas = kShardings[program.job.sharding].first == std::string("whole") && seed.chance(2);
  program.job.overlap = seed.chance(3);
  program.job.schedules = seed.chance(4) ? 2 : 1;
  program.directory = seed.chance(2);
  program.first = seed.chance(2);
  program.options.timeout = kTimeout;
  program.options.checksums = !seed.chance(4);
  program.in_order = seed.chance(4);
  if (program.directory) program.options.max_shard_size = 200;
  program.ops = some_ops(seed);
  return program;
}

}  // namespace

std::string wrong_with_program(Simulation& simulation, const Program& program, const Weather& weather,
                               const fs::path& folder, const After& after) {
  forget_earlier_runs();
  testing_disk::random_writes = !program.in_order;
  const size_t open_before = descriptors();
  const size_t ranks = static_cast<size_t>(program.job.ranks);
  Expected run = expected(program, folder);
  std::vector<std::string> differences(ranks), stops(ranks), seen;
  std::vector<std::unique_ptr<Model>> models(ranks);
  std::vector<std::unique_ptr<Trainer>> trainers(ranks);
  std::vector<std::vector<std::vector<std::byte>>> staging(ranks, std::vector<std::vector<std::byte>>(5));
  std::string wrong;
  {
    const int readers = weather.reader ? 1 : 0;
    std::vector<int> jobs(1, program.job.ranks);
    jobs.resize(1 + static_cast<size_t>(readers), 1);
    World world(simulation, {jobs, folder, weather.faults, weather.mutant, kTimeout, weather.through_store, 5});
    const auto began = simulation.now();
    const auto read = [&](Group&) {
      for (int left = 4; left > 0; --left) {
        simulation.sleep(std::chrono::microseconds(simulation.below(20'000)));
        const int path = simulation.below(kPaths);
        const auto told = told_by(run, path, world.recording().calls.size());
        seen.push_back(wrong_content(program, run, folder, path, told.value_or(0), !told));
      }
    };
    const auto train = [&](size_t rank, Group& group) {
      models[rank] = std::make_unique<Model>(program.job, static_cast<int>(rank), program.job.ranks, &group);
      trainers[rank] = std::make_unique<Trainer>(simulation, world, program, folder, run, static_cast<int>(rank),
                                                 *models[rank], staging[rank]);
      differences[rank] = trainers[rank]->go(group, stops[rank]);
    };
    simulation.run(world.ranks(), [&](int rank) {
      world.live(rank, [&](Group& group) {
        rank < program.job.ranks ? train(static_cast<size_t>(rank), group) : read(group);
      });
    });
    const auto patience = kTimeout * 4 * (1 + static_cast<int>(weather.faults.size()));
    for (size_t rank = 0; rank < ranks && wrong.empty(); ++rank) {
      if (!differences[rank].empty())
        wrong = fmt::format("rank {} ends with other values than its program has: {}", rank, differences[rank]);
      if (!stops[rank].empty() && weather.faults.empty())
        wrong = fmt::format("it fails where nothing is wrong: {}", stops[rank]);
    }
    for (const std::string& one : seen) wrong = wrong.empty() ? one : wrong;
    if (wrong.empty()) wrong = wrong_verdicts(world, program, run);
    if (wrong.empty()) wrong = wrong_contents(program, run, folder, world.recording().calls.size());
    if (wrong.empty() && simulation.now() - began > patience)
      wrong = fmt::format("it took {} s", std::chrono::duration<double>(simulation.now() - began).count());
    if (wrong.empty() && after) wrong = after(run, world.recording());
  }
  trainers.clear();
  models.clear();
  if (wrong.empty() && descriptors() != open_before)
    wrong = fmt::format("{} descriptors were open before it, and {} are after", open_before, descriptors());
  return wrong;
}

std::string wrong_with_training(uint64_t seed, const fs::path& folder, Mutant mutant, std::string* story) {
  struct Folder {
    explicit Folder(fs::path at) : path(std::move(at)) { fs::remove_all(path), fs::create_directories(path); }
    ~Folder() { fs::remove_all(path); }
    const fs::path path;
  };
  const Folder live(folder / "live"), disk(folder / "disk");
  std::optional<Simulation> simulation;
  simulation.emplace(seed, story != nullptr);
  const Program program = some_program(*simulation);
  simulation->draw();  // which seeds mean what they did
  Weather weather{{}, mutant, simulation->chance(3), simulation->chance(2)};
  for (int left = simulation->below(3); left > 0; --left) {
    const auto kind = some_fault(*simulation, weather.through_store);
    weather.faults.push_back(
        {kind, simulation->below(program.job.ranks), simulation->below(simulation->chance(2) ? 60 : 400)});
  }
  Expected run;
  testing_disk::Nodes left;
  size_t cut = 0, calls = 0;
  std::string wrong =
      wrong_with_program(*simulation, program, weather, live.path, [&](const Expected& ran, const auto& recording) {
        run = ran;
        std::mt19937 random(static_cast<unsigned>(simulation->draw()));
        calls = recording.calls.size();
        cut = simulation->chance(3) ? calls : random() % (calls + 1);
        left = testing_disk::after_power_cut(recording.before, recording.calls, cut, testing_disk::Fate::kAny, random);
        return "";
      });
  if (story != nullptr) *story = fmt::format("{} ranks\n{}", program.job.ranks, simulation->story());
  simulation.reset();
  if (!wrong.empty()) return wrong;
  testing_disk::restore(left, 0, disk.path, true);
  wrong = wrong_contents(program, run, disk.path, cut);
  if (wrong.empty()) wrong = after_the_next_saves(seed, program, mutant, disk.path, story);
  if (!wrong.empty()) return fmt::format("after a power cut ({} of {} calls) {}", cut, calls, wrong);
  return after_the_next_saves(seed, program, mutant, live.path, story);
}

}  // namespace shardow::simulated
