// What a rank of a simulated training does: steps, swaps, saves, and saves that another thread of it writes meanwhile.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "trained_state.h"
#include "world.h"

namespace shardow::simulated {

enum class What {
  kTrain,
  kSwap,  ///< the averages in, or out again
  kReset,
  kLoad,  ///< the averages, of what lies in "start"
  kSave,
  kAsync,  ///< a save in the background, when the one before to this path has ended
  kWait,   ///< for it
};

struct Op {
  What what;
  int path = 0;  ///< 0: the weights' checkpoint; 1: the averages'
};

struct Program {
  Job job;
  std::vector<Op> ops;
  bool directory = false;    ///< the weights' checkpoint is one
  bool first = true;         ///< nothing is there before; else the state of step 0
  bool in_order = false;     ///< the storage takes files only from front to end
  SaveOptions options = {};  ///< of all saves
};

constexpr const char* kStart = "start";
std::string name_of(const Program& program, int path);

/// What there is to know of a save, its content before anything happens; in the order in which they are asked for.
struct Saved {
  int path;
  Content content;
  std::vector<std::optional<int>> codes = {};  ///< of each rank that has an answer: an Error's, or kFine
  std::optional<size_t> told = {};  ///< the first rank had its good news when so many calls of the disk were made
  bool begun = false;
};

/// What a run of it is to come to, by a rank that has everything.
struct Expected {
  std::vector<Saved> saves;  ///< the first two are what was there, where something was
  Content weights, averages;
};
Expected expected(const Program& program, const std::filesystem::path& folder);

/// One rank's way through the program. Memory outlives it: threads in the background may read on when it has died.
class Trainer {
 public:
  Trainer(Simulation& simulation, World& world, const Program& program, const std::filesystem::path& folder,
          Expected& run, int rank, Model& model, std::vector<std::vector<std::byte>>& staging)
      : simulation_(simulation),
        world_(world),
        program_(program),
        folder_(folder),
        run_(run),
        rank_(rank),
        model_(model),
        staging_(staging) {}

  /// What differs in its memory at the end; "" also where it was stopped by an error. `stopped` says which.
  std::string go(Group& group, std::string& stopped);

 private:
  struct UnderWay {
    int thread, lane;
    size_t save;
  };

  void one(Group& group, const Op& op);
  void save(Group& group, size_t save);
  void save_in_background(size_t save);
  int free_lane(int path);
  void settle(int path);
  void attempt(size_t save, const std::function<void()>& fn);
  void answer(size_t save, int code);
  void check(size_t save) const;
  std::vector<SaveFile> files(Group& group, int path);
  std::filesystem::path path_of(int path) const { return folder_ / name_of(program_, path); }

  Simulation& simulation_;
  World& world_;
  const Program& program_;
  const std::filesystem::path& folder_;
  Expected& run_;
  const int rank_;
  Model& model_;
  std::vector<std::vector<std::byte>>& staging_;
  std::vector<UnderWay> under_way_;
  size_t next_ = 0;
};

}  // namespace shardow::simulated
