// What shardow/libtorch.h makes a Group of: keys and values that all ranks reach. Nothing here is public.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Thrown by a Store in place of an answer: its caller was interrupted.
class Interruption {
 public:
  virtual ~Interruption() = default;
  virtual bool put_off() = 0;  ///< whether the caller may go on: what interrupted it comes again later
  virtual std::exception_ptr exception(const std::string& waited) = 0;  ///< for the caller; `waited`: in what
};

/// Keys and values that all ranks reach: c10d's, etcd, this process's memory. One thread at a time; kPeerFailed where
/// it is gone. Values are any bytes, up to 4 MiB each.
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

  /// Atomic, of values that no two ranks have alike. Override it where the store can append.
  virtual void append(const std::string& key, const std::string& value);

  virtual void erase(const std::string& key) = 0;  ///< whether it is there or not

  /// From now on kTimeout where the store has no answer by then. `asked`: seconds, as messages say it.
  virtual void answer_by(Deadline /*limit*/, double /*asked*/) {}
};

/// The store starts empty, and is for this Group alone. The n-th Group that a rank makes of a store acts with the n-th
/// of the others.
std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size);

}  // namespace shardow
#pragma GCC visibility pop
