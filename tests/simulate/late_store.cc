#include "late_store.h"

#include <algorithm>

#include "group/memory_store.h"

namespace shardow::simulated {

void LateStore::set(const std::string& key, const std::string& value) {
  const auto takes = transit_("set");
  last_ = std::max(last_, simulation_.now() + takes);
  shelf_->under_way.emplace(last_, std::pair(key, value));
  arrive();
  simulation_.notify(shelf_.get());  // who waits for something learns when the next message is due
}

std::optional<std::string> LateStore::get(const std::string& key, Deadline deadline) {
  reach("get");
  for (;; arrive()) {
    if (const auto entry = shelf_->values.find(key); entry != shelf_->values.end()) return entry->second;
    if (simulation_.now() >= deadline) return std::nullopt;
    const auto next = shelf_->under_way.begin();
    simulation_.wait(shelf_.get(), next == shelf_->under_way.end() ? deadline : std::min(deadline, next->first));
  }
}

bool LateStore::check(const std::string& key) {
  reach("check");
  return shelf_->values.contains(key);
}

int64_t LateStore::add(const std::string& key, int64_t amount) {
  reach("add");
  return group::added(shelf_->values, key, amount);
}

std::string LateStore::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  reach("compare_set");
  const std::string value = group::compared(shelf_->values, key, expected, desired);
  simulation_.notify(shelf_.get());
  return takes_own_verdict_ && expected.empty() ? desired : value;
}

void LateStore::append(const std::string& key, const std::string& value) {
  reach("append");
  shelf_->values[key] += value;
}

void LateStore::erase(const std::string& key) {
  reach("erase");
  shelf_->values.erase(key);
}

void LateStore::arrive() {
  auto& under_way = shelf_->under_way;
  bool any = false;
  for (; !under_way.empty() && under_way.begin()->first <= simulation_.now(); any = true) {
    shelf_->values[under_way.begin()->second.first] = std::move(under_way.begin()->second.second);
    under_way.erase(under_way.begin());
  }
  if (any) simulation_.notify(shelf_.get());
}

void LateStore::reach(const char* what) {
  const auto takes = transit_(what);
  last_ = std::max(last_, simulation_.now() + takes);
  if (last_ > simulation_.now()) simulation_.sleep(last_ - simulation_.now());
  arrive();
}

std::vector<std::unique_ptr<Group>> late_groups(Simulation& simulation, const LateStore::Transit& transit,
                                                bool takes_own_verdict, int ranks) {
  std::vector<std::unique_ptr<Group>> groups;
  const auto shelf = std::make_shared<Shelf>();
  for (int rank = 0; rank < ranks; ++rank) {
    auto store = std::make_unique<LateStore>(simulation, shelf, transit, takes_own_verdict);
    groups.push_back(store_group(std::move(store), rank, ranks));
  }
  return groups;
}

}  // namespace shardow::simulated
