// Keys and values behind a network: what a rank sends arrives in its order, some simulated time later.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/custom_group.h"
#include "simulation.h"

namespace shardow::simulated {

/// What all ranks reach.
struct Shelf {
  std::map<std::string, std::string> values;
  std::map<std::string, int64_t> counts;
  std::multimap<base::Time, std::pair<std::string, std::string>> under_way;  ///< by when they arrive
};

/// One rank's connection. A call on no simulated rank takes no time.
class LateStore final : public Store {
 public:
  using Transit = std::function<std::chrono::nanoseconds(const char* what)>;  ///< how long a message takes; throws what
                                                                              ///< ends the rank

  /// `takes_own_verdict`: a mistake, for tests of the test: set_first() returns what the caller proposed.
  LateStore(Simulation& simulation, std::shared_ptr<Shelf> shelf, Transit transit, bool takes_own_verdict)
      : simulation_(simulation),
        shelf_(std::move(shelf)),
        transit_(std::move(transit)),
        takes_own_verdict_(takes_own_verdict) {}

  void set(const std::string& key, const std::string& value) override;
  std::string set_first(const std::string& key, const std::string& value) override;
  std::vector<std::string> get(const std::vector<std::string>& keys) override;
  bool has(const std::string& key) override;
  bool wait(const std::vector<std::string>& keys, Deadline deadline) override;
  int64_t add(const std::string& key) override;
  void erase(const std::string& key) override;

 private:
  void arrive();                 ///< what is due by now
  void reach(const char* what);  ///< the shelf, and come back with an answer

  Simulation& simulation_;
  const std::shared_ptr<Shelf> shelf_;
  const Transit transit_;
  const bool takes_own_verdict_;
  base::Time last_{};  ///< when what this rank sent last arrives
};

/// The groups of `ranks` ranks over such a store.
std::vector<std::unique_ptr<Group>> late_groups(Simulation& simulation, const LateStore::Transit& transit,
                                                bool takes_own_verdict, int ranks);

}  // namespace shardow::simulated
