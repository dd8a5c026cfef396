#include "comm/memory_store.h"

#include <utility>

namespace shardow::comm {

using base::Lock;

void MemoryStore::set(const std::string& key, const std::string& value) {
  const Lock lock(shelf_->mutex);
  shelf_->values[key] = value;
  shelf_->changed.notify_all();
}

std::optional<std::string> MemoryStore::get(const std::string& key, Deadline deadline) {
  const Lock lock(shelf_->mutex);
  for (bool in_time = true;; in_time = shelf_->changed.wait_until(shelf_->mutex, deadline)) {
    if (const auto found = shelf_->values.find(key); found != shelf_->values.end()) return found->second;
    if (!in_time) return std::nullopt;
  }
}

bool MemoryStore::check(const std::string& key) {
  const Lock lock(shelf_->mutex);
  return shelf_->values.contains(key);
}

int64_t MemoryStore::add(const std::string& key, int64_t amount) {
  const Lock lock(shelf_->mutex);
  return added(shelf_->values, key, amount);
}

std::string MemoryStore::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  const Lock lock(shelf_->mutex);
  shelf_->changed.notify_all();
  return compared(shelf_->values, key, expected, desired);
}

void MemoryStore::append(const std::string& key, const std::string& value) {
  const Lock lock(shelf_->mutex);
  shelf_->values[key] += value;
  shelf_->changed.notify_all();
}

void MemoryStore::erase(const std::string& key) {
  const Lock lock(shelf_->mutex);
  shelf_->values.erase(key);
}

int64_t added(std::map<std::string, std::string>& values, const std::string& key, int64_t amount) {
  std::string& value = values[key];
  const int64_t sum = (value.empty() ? 0 : std::stoll(value)) + amount;
  value = std::to_string(sum);
  return sum;
}

std::string compared(std::map<std::string, std::string>& values, const std::string& key, const std::string& expected,
                     const std::string& desired) {
  const auto found = values.find(key);
  if (found == values.end() && !expected.empty()) return "";
  std::string& value = found == values.end() ? values[key] : found->second;
  if (value == expected) value = desired;
  return value;
}

}  // namespace shardow::comm
