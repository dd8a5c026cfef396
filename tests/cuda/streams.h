// The queues behind the fake driver, and who takes what from them when.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "emulation.h"

namespace shardow::fake {

/// The end of an operation; others wait for it.
struct Mark {
  bool done = false;
};
using MarkPtr = std::shared_ptr<Mark>;

/// What an operation does, in parts that may be done in any order. Can be done again: a graph keeps it.
struct Work {
  size_t parts = 1;
  std::function<void(size_t part, Random* random)> part;  ///< empty: it only waits
  std::vector<uint64_t> blocks = {};                      ///< of memory that it was given
};

/// All of it is guarded by mutex().
class Streams {
 public:
  ~Streams() { stop(); }
  void start(std::optional<uint64_t> seed, bool threads);  ///< nothing is left of what was
  void stop();                                             ///< does what there is and ends the threads

  struct Kind {
    int device;
    bool blocking;
  };

  void* make(int device, bool blocking);  ///< a handle that none has had before
  bool retire(void* stream);              ///< what it has is still done; false: there is none
  std::optional<Kind> kind_of(void* stream) const;
  MarkPtr add(int device, void* stream, Work work, std::vector<MarkPtr> after = {});  ///< the mark of its end
  MarkPtr last(int device, void* stream);                     ///< of what the stream has by now; null: nothing
  std::vector<MarkPtr> all(std::optional<int> device) const;  ///< of all there is

  /// Returns when done() holds. `lock` is of mutex().
  void until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done);
  void some(std::unique_lock<std::mutex>& lock);  ///< at a call of the driver: as much as is drawn
  void everything();

  size_t pending() const;
  bool uses(uint64_t block) const;  ///< something under way was given it
  /// Operations until the device fails for good, and every call says so; 0: it has; < 0: it does not.
  int until_broken = -1;

  std::mutex& mutex() { return mutex_; }

 private:
  struct Operation {
    Work work;
    std::vector<MarkPtr> after;
    MarkPtr mark;
    std::vector<size_t> order;  // of the parts that are left
  };
  struct Stream {
    int device;
    void* handle;
    bool blocking;
    std::deque<Operation> queue;
    MarkPtr last;
    int stalled = 0;
    std::thread thread;
    std::condition_variable changed;
  };

  Stream& find(int device, void* stream);
  Stream& begin(int device, void* handle, bool blocking);
  static bool ready(const Stream& stream);
  void advance(Stream& stream);
  bool advance_one();
  void end(Stream& stream);
  void work(Stream& stream);
  bool pass(std::unique_lock<std::mutex>& lock);
  bool broken() const { return until_broken == 0; }

  std::mutex mutex_;
  std::list<Stream> streams_;  // in the order in which they were met, which does not depend on addresses
  std::optional<Random> random_;
  unsigned eagerness_ = 0;
  bool threads_ = false, ending_ = false;
  uintptr_t last_handle_ = 0x1000;
  std::condition_variable done_;
};

}  // namespace shardow::fake
