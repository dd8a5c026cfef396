// Store: keys and values that all ranks reach, of which store_group() makes a Group. Fill it over what your cluster
// has; libtorch.h fills it over a c10d store.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// c10d's, etcd, a process's memory. One thread at a time; kPeerFailed where it is gone. Values are any bytes, up to
/// 4 MiB each.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;

  /// Waits for the key; nothing where it is not there by then.
  virtual std::optional<std::string> get(const std::string& key, Deadline deadline) = 0;

  virtual bool check(const std::string& key) = 0;  ///< whether it is there now

  /// Atomic. Returns the sum; a key that is not there counts as 0.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;

  /// Atomic: `desired` in place of `expected`. Returns what is there then; a key that is not there counts as empty, and
  /// is made where `expected` is.
  virtual std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) = 0;

  virtual void erase(const std::string& key) = 0;  ///< whether it is there or not

  /// Atomic, of values that no two ranks have alike. Override it where the store can append.
  virtual void append(const std::string& key, const std::string& value);

  /// From now on kTimeout where the store has no answer by then. `asked`: seconds, as messages say it.
  virtual void answer_by(Deadline /*limit*/, double /*asked*/) {}
};

/// The store starts empty, and is for this Group alone. The n-th Group that a rank makes of a store acts with the n-th
/// of the others.
std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size);

}  // namespace shardow
#pragma GCC visibility pop
