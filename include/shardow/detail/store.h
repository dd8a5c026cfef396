// What shardow/libtorch.h makes a Group of: keys and values that all ranks reach. Nothing here is public.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Keys and values that all ranks reach; kPeerFailed where it is gone. Holds any bytes; is asked for, and to erase,
/// keys that are there alone.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;  ///< up to 4 MiB

  /// Atomic: sets it where none is; returns what is there.
  virtual std::string set_first(const std::string& key, const std::string& value) = 0;

  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;  ///< which are there
  virtual bool has(const std::string& key) = 0;
  virtual bool wait(const std::vector<std::string>& keys, Deadline deadline) = 0;  ///< for all; false: not by then
  virtual int64_t add(const std::string& key) = 0;                                 ///< adds 1, returns the sum
  virtual void erase(const std::string& key) = 0;
};

/// The store starts empty, and is for this Group alone. The n-th Group that a rank makes of a store acts with the n-th
/// of the others.
std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size);

}  // namespace shardow
#pragma GCC visibility pop
