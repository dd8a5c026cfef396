// MemoryStore: keys and values of one process, for ranks that are threads.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "shardow/detail/store.h"

namespace shardow::comm {

class MemoryStore final : public Store {
 public:
  struct Shelf {
    base::Mutex mutex;
    base::Condition changed;
    std::map<std::string, std::string> values SHARDOW_GUARDED_BY(mutex);
  };

  explicit MemoryStore(std::shared_ptr<Shelf> shelf) : shelf_(std::move(shelf)) {}

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;
  bool check(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override;
  void append(const std::string& key, const std::string& value) override;
  void erase(const std::string& key) override;

 private:
  const std::shared_ptr<Shelf> shelf_;
};

/// What Store::add() and Store::compare_set() do to values in a map.
int64_t added(std::map<std::string, std::string>& values, const std::string& key, int64_t amount);
std::string compared(std::map<std::string, std::string>& values, const std::string& key, const std::string& expected,
                     const std::string& desired);

}  // namespace shardow::comm
