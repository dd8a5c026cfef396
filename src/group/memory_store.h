// MemoryStore: keys and values of one process, for ranks that are threads.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "shardow/store.h"

namespace shardow::group {

using Values = std::map<std::string, std::string>;

/// Adds as Store::add() does.
inline int64_t added(Values& values, const std::string& key, int64_t amount) {
  std::string& value = values[key];
  value = std::to_string((value.empty() ? 0 : std::stoll(value)) + amount);
  return std::stoll(value);
}

/// Compares and sets as Store::compare_set() does.
inline std::string compared(Values& values, const std::string& key, const std::string& expected,
                            const std::string& desired) {
  const auto entry = expected.empty() ? values.try_emplace(key).first : values.find(key);
  if (entry == values.end()) return "";
  if (entry->second == expected) entry->second = desired;
  return entry->second;
}

class MemoryStore final : public Store {
 public:
  struct Shelf {
    base::Mutex mutex;
    base::Condition changed;
    Values values SHARDOW_GUARDED_BY(mutex);
  };

  explicit MemoryStore(std::shared_ptr<Shelf> shelf) : shelf_(std::move(shelf)) {}

  void set(const std::string& key, const std::string& value) override {
    const base::Lock lock(shelf_->mutex);
    shelf_->values[key] = value;
    shelf_->changed.notify_all();
  }

  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    const base::Lock lock(shelf_->mutex);
    for (bool in_time = true;; in_time = shelf_->changed.wait_until(shelf_->mutex, deadline)) {
      if (const auto entry = shelf_->values.find(key); entry != shelf_->values.end()) return entry->second;
      if (!in_time) return std::nullopt;
    }
  }

  bool check(const std::string& key) override {
    const base::Lock lock(shelf_->mutex);
    return shelf_->values.contains(key);
  }

  int64_t add(const std::string& key, int64_t amount) override {
    const base::Lock lock(shelf_->mutex);
    return added(shelf_->values, key, amount);
  }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    const base::Lock lock(shelf_->mutex);
    shelf_->changed.notify_all();
    return compared(shelf_->values, key, expected, desired);
  }

  void erase(const std::string& key) override {
    const base::Lock lock(shelf_->mutex);
    shelf_->values.erase(key);
  }

 private:
  const std::shared_ptr<Shelf> shelf_;
};

}  // namespace shardow::group
