#include "run.h"

#include <fmt/format.h>

#include <algorithm>

#include "seams.h"

namespace shardow::simulated {
namespace {

using versions::version_of;
using versions::Way;

constexpr milliseconds kTimeout{60'000};
constexpr auto kPatience = 4 * kTimeout;  // of all rounds together, each of which waits for one timeout at most
const std::vector<Spec> kTensors = {{"a", DType::kF32, {7, 30}}, {"b", DType::kBF16, {5, 3}}, {"c", DType::kF64, {}}};

enum class Call { kSave, kLoad };

/// What a seed stands for, before anything happens.
struct Plan {
  Call call;
  Way way;
  std::vector<int> jobs;  ///< ranks of each; the second one saves to the same path at the same time
  size_t sharding, sharding_before;
  std::vector<Fault> faults = {};
  bool through_store;

  explicit Plan(Simulation& seed)
      : call(seed.chance(5) ? Call::kLoad : Call::kSave),
        way(some_way(seed)),
        jobs{1 + seed.below(4)},
        sharding(static_cast<size_t>(seed.below(static_cast<int>(kShardings.size())))),
        sharding_before(static_cast<size_t>(seed.below(static_cast<int>(kShardings.size())))),
        through_store(seed.chance(3)) {
    if (call == Call::kLoad) way.first = false;
    if (call == Call::kSave && seed.chance(4)) jobs.push_back(1 + seed.below(2));
    for (int left = seed.below(3); left > 0; --left) {
      faults.push_back({some_fault(seed, through_store), seed.below(jobs[0]), seed.below(seed.chance(2) ? 40 : 160)});
    }
  }

  static Way some_way(Simulation& seed) {
    const std::vector<Way> ways = versions::ways();
    Way way = ways[static_cast<size_t>(seed.below(static_cast<int>(ways.size())))];
    way.options.timeout = kTimeout;
    way.options.checksums = !seed.chance(4);
    if (way.options.max_shard_size != 0) way.options.max_shard_size = 200;
    return way;
  }
};

/// Of one seed in four the storage of a rank stands still; those that were written down before play as they did.
bool stands_still(uint64_t seed) {
  return seed / 2 % 4 == 2;
}

struct Folder {
  explicit Folder(fs::path at) : path(std::move(at)) { fs::remove_all(path), fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
  const fs::path path;
};

constexpr int kWrongValues = -2;
using Codes = std::vector<std::optional<int>>;  ///< by rank; none of those that died

/// What `fn` comes to on a rank: an Error's code, or kFine, or what it returns.
Codes on_all(Simulation& simulation, World& world, const std::function<int(Group&)>& fn) {
  Codes codes(static_cast<size_t>(world.ranks()));
  simulation.run(world.ranks(), [&](int rank) {
    world.live(rank, [&](Group& group) {
      int code = kFine;
      try {
        code = fn(group);
      } catch (const Error& error) {
        simulation.remember([&] { return fmt::format("rank {}: {}", rank, error.what()); });
        code = static_cast<int>(error.code());
      } catch (const std::exception& error) {
        simulation.remember([&] { return fmt::format("rank {}: {}", rank, error.what()); });
        code = static_cast<int>(Code::kInternal);
      }
      if (!world.died(rank)) codes[static_cast<size_t>(rank)] = code;
    });
  });
  return codes;
}

Codes save_version(Simulation& simulation, World& world, int which, const Plan& plan, size_t sharding,
                   const fs::path& folder) {
  version = which;
  return on_all(simulation, world, [&](Group& group) {
    auto held = versions::values(kTensors, kShardings[sharding].second, group.rank(), group.size());
    versions::save_version(group, held, which, plan.way, folder);
    return kFine;
  });
}

Codes load_version(Simulation& simulation, World& world, int which, const Plan& plan, const fs::path& folder) {
  version = which;
  return on_all(simulation, world, [&](Group& group) {
    const auto expected = versions::values(kTensors, kShardings[plan.sharding].second, group.rank(), group.size());
    auto held = versions::values(kTensors, kShardings[plan.sharding].second, group.rank(), group.size());
    for (Held& one : held) std::fill(one.memory.begin(), one.memory.end(), std::byte{0xee});
    fs::path path = folder / versions::target(plan.way);
    if (!plan.way.names.empty()) path /= plan.way.names[0];
    load(group, views_of(held), path, {.timeout = kTimeout});
    for (size_t i = 0; i < held.size(); ++i) {
      if (held[i].memory != expected[i].memory) return kWrongValues;
    }
    return kFine;
  });
}

/// What lies beside the checkpoint and belongs to nobody.
std::string leftovers(const fs::path& folder, const Way& way) {
  std::string found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() != versions::target(way)) found += " " + entry.path().filename().string();
  }
  const fs::path own = folder / versions::target(way) / "config.json";
  if (way.directory && !way.first && bytes_of(own) != "mine") found += " (and somebody else's config.json has gone)";
  return found + versions::strays(folder / versions::target(way), {"config.json", versions::kText});
}

/// Version `next` is saved, while calls are done that were left by saves before, and after it. Those that are `late`
/// stay.
std::string wrong_with_the_next(uint64_t seed, int next, const Plan& plan, const fs::path& folder, Mutant mutant,
                                std::string* story, const std::vector<Late>& late) {
  Simulation simulation(seed, story != nullptr);
  World world(simulation, {.jobs = {plan.jobs[0]}, .folder = folder, .mutant = mutant, .late = late});
  const auto codes = save_version(simulation, world, next, plan, plan.sharding_before, folder);
  if (story != nullptr) *story += "\n\nthe next save:\n" + simulation.story();
  if (std::any_of(codes.begin(), codes.end(), [](const auto& code) { return code != kFine; }))
    return "the next save fails";
  if (const int found = version_of(folder, plan.way, kTensors); found != next)
    return fmt::format("the next save leaves version {}", found);
  testing_disk::Recorder disk(folder);
  for (const Late& one : world.take_late()) one(disk);
  const int found = version_of(folder, plan.way, kTensors);
  return found == next ? "" : fmt::format("a call that was left puts version {} in the place of {}", found, next);
}

/// After whatever happened, the next save works and cleans up; where calls were left by then, the one that follows it.
std::string after_the_next_save(uint64_t seed, const Plan& plan, const fs::path& folder, Mutant mutant,
                                std::string* story, const std::vector<Late>& late = {}) {
  std::string wrong =
      late.empty() ? "" : wrong_with_the_next(seed + (uint64_t{1} << 40), 3, plan, folder, mutant, story, late);
  if (wrong.empty())
    wrong = wrong_with_the_next(~seed, 2, plan, folder, mutant, story, {});  // with other names for its files
  if (!wrong.empty()) return wrong;
  const std::string left = leftovers(folder, plan.way);
  return left.empty() ? "" : "the next save leaves" + left;
}

/// `code` of the ranks of a job that did not die are all kFine, or none is.
std::string wrong_verdict(const Codes& codes, const Plan& plan, std::chrono::nanoseconds took) {
  if (took > kPatience + 2 * kTimeout * static_cast<int>(plan.faults.size()))
    return fmt::format("it took {} s", std::chrono::duration<double>(took).count());
  auto first = codes.begin();
  for (const int ranks : plan.jobs) {
    std::set<bool> fine;
    for (const auto last = first + ranks; first != last; ++first) {
      if (*first == kWrongValues) return "a rank has other values than were saved";
      if (*first) fine.insert(**first == kFine);
    }
    if (fine.size() > 1) return "some ranks were told that all is well, and others that it is not";
    if (plan.faults.empty() && fine.contains(false)) return "it fails where nothing is wrong";
  }
  return "";
}

/// What a reader finds in `folder`.
std::string wrong_version(const Plan& plan, const fs::path& folder, bool must_be_new) {
  const int old = plan.way.first ? 0 : 1, found = version_of(folder, plan.way, kTensors);
  if (found == 2 || (found == old && !must_be_new)) return "";
  return fmt::format("a reader finds version {}{}", found,
                     must_be_new ? ", and all ranks were told that it is saved" : "");
}

}  // namespace

std::string wrong_with(uint64_t seed, const fs::path& folder, Mutant mutant, std::string* story) {
  forget_earlier_runs();
  const Folder live(folder / "live"), disk(folder / "disk");
  std::optional<Simulation> simulation;
  simulation.emplace(seed, story != nullptr);
  Plan plan(*simulation);
  if (stands_still(seed))
    plan.faults.push_back({Fault::Kind::kStands, simulation->chance(2) ? 0 : simulation->below(plan.jobs[0]),
                           simulation->below(simulation->chance(2) ? 40 : 160)});
  if (!plan.way.first) {
    World world(*simulation, {.jobs = {plan.jobs[0]}, .folder = live.path});
    save_version(*simulation, world, 1, plan, plan.sharding_before, live.path);
    if (plan.way.directory) std::ofstream(live.path / "model" / "config.json") << "mine";
  }
  World world(*simulation, {plan.jobs, live.path, plan.faults, mutant, kTimeout, plan.through_store});
  const auto began = simulation->now();
  const auto codes = plan.call == Call::kSave ? save_version(*simulation, world, 2, plan, plan.sharding, live.path)
                                              : load_version(*simulation, world, 1, plan, live.path);
  const auto took = simulation->now() - began;
  const bool fine = plan.call == Call::kSave &&
                    std::all_of(codes.begin(), codes.end(), [](const auto& code) { return code == kFine; });
  const std::vector<Late> late = world.take_late();
  const auto& recording = world.recording();
  std::mt19937 random(static_cast<unsigned>(simulation->draw()));
  const size_t cut = simulation->chance(3) ? recording.calls.size() : random() % (recording.calls.size() + 1);
  if (story != nullptr)
    *story = fmt::format("{}, ranks {}\n{}", plan.way.name, fmt::join(plan.jobs, " and "), simulation->story());
  simulation.reset();

  std::string wrong = wrong_verdict(codes, plan, took);
  if (wrong.empty()) wrong = wrong_version(plan, live.path, fine);
  if (!wrong.empty()) return wrong;
  const auto left =
      testing_disk::after_power_cut(recording.before, recording.calls, cut, testing_disk::Fate::kAny, random);
  testing_disk::restore(left, 0, disk.path, true);
  wrong = wrong_version(plan, disk.path, fine && cut == recording.calls.size());
  if (wrong.empty()) wrong = after_the_next_save(seed, plan, disk.path, mutant, story);
  if (!wrong.empty()) return fmt::format("after a power cut ({} of {} calls) {}", cut, recording.calls.size(), wrong);
  return after_the_next_save(seed, plan, live.path, mutant, story, late);
}

}  // namespace shardow::simulated
