// A thread for work that goes on while its owner does something else.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

namespace shardow::base {

/// One piece of work at a time, on a thread that stays. One thread uses a Worker at a time, which is the owner of all
/// that a piece touches from its end on.
///
/// A fork waits for the work of every worker, so that the child finds whole what it worked on; the child's first piece
/// starts a thread anew.
class Worker {
 public:
  Worker();
  ~Worker();  ///< waits
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// `piece()` on the thread, after wait(). Where the system refuses a thread: here, before this returns.
  void begin(std::function<void()> piece);
  /// Until the piece has ended; throws what it threw, once. Returns at once where there is none.
  void wait();
  bool busy() const noexcept { return is_busy(state_.load(std::memory_order_acquire)); }

  /// By the piece: what wait_for_part() waits for is done.
  void part_done() noexcept;
  /// Until the piece has called part_done() or has ended.
  void wait_for_part() const noexcept;

 private:
  enum State : int { kIdle, kBusy, kPartDone, kEnd };
  static bool is_busy(int state) noexcept { return state == kBusy || state == kPartDone; }
  friend class Workers;

  void settle() const noexcept;
  void work() noexcept;
  void perform() noexcept;

  // piece_ and error_ are the thread's while busy(), else the owner's.
  std::function<void()> piece_;
  std::exception_ptr error_;
  std::atomic<int> state_{kIdle};
  std::unique_ptr<std::thread> thread_;  ///< null before the first piece, and in a forked child
};

/// For tests: called on the worker's thread before a piece. What it waits for holds the work up.
inline std::function<void()> worker_seam;

}  // namespace shardow::base
