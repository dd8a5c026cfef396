// The queues behind the fake driver, and who takes what from them when.
//
// By a seed: each step takes one part of the first operation of a stream whose operation waits for nothing, both drawn.
// A stream may be stalled for a number of steps, so that the others get far ahead. How much is done at a call of the
// driver is drawn too; some seeds are so lazy that nothing happens before the host waits.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "emulation.h"
#include "memory.h"

namespace shardow::fake {

/// For threads that take turns: called at each call of the driver and again and again where the host waits, with
/// nothing locked.
extern __attribute__((visibility("default"))) std::function<void()> between;

/// The end of an operation, for which others wait: true when it is done. Null: there was none.
using Mark = std::shared_ptr<bool>;

inline bool done(const Mark& mark) {
  return mark == nullptr || *mark;
}

/// What an operation does, in parts that may be done in any order. Can be done again: a graph keeps it.
struct Work {
  size_t parts = 1;
  std::function<void(size_t part, Random* random)> part;  ///< empty: it only waits
  std::vector<Block> blocks = {};                         ///< of memory that it was given
};

struct Operation {
  Work work;
  std::vector<Mark> after;
  Mark mark;
  std::vector<size_t> order;  ///< of the parts that are left
};

struct Capture;

struct Stream {
  int device;
  void* handle;
  bool blocking;  ///< it and the default stream wait for each other, which a capture can't have
  std::shared_ptr<Capture> capture = nullptr;  ///< of streams that are captured together the same
  std::deque<Operation> queue = {};
  Mark last = nullptr;
  int stalled = 0;
  std::thread thread = {};
};

/// All of it is guarded by mutex().
class Streams {
 public:
  /// Does what there is and ends the threads; nothing is left of what was
  void start(std::optional<uint64_t> seed, bool threads) {
    {
      const std::lock_guard lock(mutex_);
      if (!threads_) everything();
      ending_ = true;
      changed_.notify_all();
    }
    for (Stream& stream : streams_) {
      if (stream.thread.joinable()) stream.thread.join();
    }
    streams_.clear();
    random_ = seed ? std::optional<Random>(*seed) : std::nullopt;
    eagerness_ = random_ ? static_cast<unsigned>((*random_)() % 4) : 0;
    threads_ = threads;
    ending_ = false;
    until_broken = -1;
  }
  /// A handle that none has had before
  void* make(int device, bool blocking = false) {
    return begin(device, reinterpret_cast<void*>(last_handle_ += 16), blocking).handle;
  }
  /// Null: none has that handle, or the device's default stream has not been used
  Stream* find(int device, void* handle) {
    for (Stream& stream : streams_) {
      if (stream.handle == handle && (handle != nullptr || stream.device == device)) return &stream;
    }
    return nullptr;
  }
  /// Every stream there is, also those whose handles are gone
  std::list<Stream>& all() { return streams_; }
  /// The mark of its end
  Mark add(int device, void* handle, Work work, std::vector<Mark> after = {}) {
    Stream& stream = at(device, handle);
    Operation operation{std::move(work), std::move(after), std::make_shared<bool>(false), {}};
    operation.order.resize(operation.work.parts);
    std::iota(operation.order.begin(), operation.order.end(), size_t{0});
    if (random_) {
      std::shuffle(operation.order.begin(), operation.order.end(), *random_);
      if ((*random_)() % 16 == 0) stream.stalled = static_cast<int>((*random_)() % 200);
    }
    stream.last = operation.mark;
    stream.queue.push_back(std::move(operation));
    changed_.notify_all();
    if (!threads_ && !random_) everything();
    return stream.last;
  }
  /// A device's default stream is there when it is first used
  Stream& at(int device, void* handle) {
    if (Stream* const stream = find(device, handle)) return *stream;
    if (handle == nullptr) return begin(device, nullptr);
    give_up("a stream that is gone, or was never made");
  }

  /// Returns when done() holds. `lock` is of mutex().
  void until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& holds) {
    if (threads_) return changed_.wait(lock, holds);
    while (!holds()) {
      const bool moved = advance_one(random_.has_value());
      if (!pass(lock) && !moved && !holds())
        give_up("the host waits for what never comes: streams wait for each other");
    }
  }
  /// At a call of the driver: as much as is drawn
  void some(std::unique_lock<std::mutex>& lock) {
    if (random_ && !threads_) {
      const auto most = uint64_t{1} << (2 * eagerness_);  // 1, 4, 16, 64
      for (uint64_t number = (*random_)() % most; number > 0 && advance_one(random_.has_value()); --number) {
      }
    }
    static_cast<void>(pass(lock));
  }
  void everything() {
    while (advance_one(false)) {
    }
  }

  size_t pending() const {
    size_t number = 0;
    for (const Stream& stream : streams_) number += stream.queue.size();
    return number;
  }
  /// Something under way was given it
  bool uses(uint64_t number) const {
    return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& stream) {
      return std::any_of(stream.queue.begin(), stream.queue.end(), [&](const Operation& operation) {
        const auto& blocks = operation.work.blocks;
        return std::any_of(blocks.begin(), blocks.end(), [&](const Block& held) { return held.number == number; });
      });
    });
  }
  /// Operations until the device fails for good, and every call says so; 0: it has; < 0: it does not.
  int until_broken = -1;
  bool broken() const { return until_broken == 0; }

  std::mutex& mutex() { return mutex_; }

 private:
  Stream& begin(int device, void* handle, bool blocking = false) {
    Stream& stream = streams_.emplace_back(Stream{device, handle, blocking});
    if (threads_) stream.thread = std::thread([this, &stream] { work(stream); });
    return stream;
  }
  static bool ready(const Stream& stream) {
    return !stream.queue.empty() &&
           std::all_of(stream.queue.front().after.begin(), stream.queue.front().after.end(), done);
  }
  /// One part. After a failure nothing is done any more, but ends.
  void advance(Stream& stream) {
    Operation& first = stream.queue.front();
    if (first.work.part && !first.order.empty() && !broken()) {
      first.work.part(first.order.back(), random_ ? &*random_ : nullptr);
      first.order.pop_back();
      if (!first.order.empty()) return;
    }
    end(stream);
  }
  /// Takes the first stream that can go on, or one that is drawn. False where nothing can be done.
  bool advance_one(bool draws) {
    std::vector<Stream*> able;
    for (Stream& stream : streams_) {
      if (ready(stream)) able.push_back(&stream);
    }
    if (able.empty()) return false;
    Stream& stream = *able[draws ? (*random_)() % able.size() : 0];
    if (draws && stream.stalled > 0) {
      --stream.stalled;
    } else {
      advance(stream);
    }
    return true;
  }
  void end(Stream& stream) {
    if (stream.queue.front().work.part && until_broken > 0) --until_broken;
    *stream.queue.front().mark = true;
    stream.queue.pop_front();
  }
  /// A stream's thread. Operations are carried out with nothing locked, so that the sanitizer sees what meets.
  void work(Stream& stream) {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ready(stream) || (ending_ && stream.queue.empty()); });
      if (stream.queue.empty()) return;
      const Operation& first = stream.queue.front();
      const bool works = first.work.part && !broken();
      lock.unlock();
      for (size_t part = 0; works && part < first.work.parts; ++part) first.work.part(part, nullptr);
      lock.lock();
      end(stream);
      changed_.notify_all();
    }
  }
  bool pass(std::unique_lock<std::mutex>& lock) {
    if (!between) return false;
    lock.unlock();
    between();
    lock.lock();
    return true;
  }

  std::mutex mutex_;
  std::list<Stream> streams_;  // in the order in which they were met, which does not depend on addresses
  std::optional<Random> random_;
  unsigned eagerness_ = 0;
  bool threads_ = false, ending_ = false;
  uintptr_t last_handle_ = 0x1000;
  std::condition_variable changed_;
};

}  // namespace shardow::fake
