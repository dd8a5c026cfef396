// Keys and values behind a network: what a rank sends arrives in its order, some simulated time later.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardow/store.h"
#include "simulation.h"

namespace shardow::simulated {

/// What all ranks reach.
struct Shelf {
  std::map<std::string, std::string> values;
  std::multimap<base::Time, std::pair<std::string, std::string>> under_way;  ///< by when they arrive
};

/// One rank's connection. A call on no simulated rank takes no time.
class LateStore final : public Store {
 public:
  using Transit = std::function<std::chrono::nanoseconds(const char* what)>;  ///< how long a message takes; throws what
                                                                              ///< ends the rank

  /// `takes_own_verdict`: a mistake, for tests of the test: compare_set() returns what the caller proposed.
  LateStore(Simulation& simulation, std::shared_ptr<Shelf> shelf, Transit transit, bool takes_own_verdict)
      : simulation_(simulation),
        shelf_(std::move(shelf)),
        transit_(std::move(transit)),
        takes_own_verdict_(takes_own_verdict) {}

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;
  bool check(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override;
  void append(const std::string& key, const std::string& value) override;
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
