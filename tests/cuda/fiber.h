// A stack of its own to run on and to leave in the middle; the sanitizers are told of each change of stacks.
#pragma once

#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

// Null where this is built without that sanitizer.
#pragma weak __sanitizer_start_switch_fiber
#pragma weak __sanitizer_finish_switch_fiber
#pragma weak __tsan_create_fiber
#pragma weak __tsan_destroy_fiber
#pragma weak __tsan_get_current_fiber
#pragma weak __tsan_switch_to_fiber

namespace shardow::fake {

/// Belongs to one thread. Its function never throws.
class Fiber {
 public:
  Fiber() : own_{{}, stack_.get(), kStack, __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr} {
    getcontext(&own_.context);
    own_.context.uc_stack.ss_sp = stack_.get();
    own_.context.uc_stack.ss_size = kStack;
    // An argument may have 64 bits where glibc has them.
    makecontext(&own_.context, reinterpret_cast<void (*)()>(&Fiber::enter), 1, this);
  }
  ~Fiber() {
    if (__tsan_destroy_fiber) __tsan_destroy_fiber(own_.fiber);
  }

  /// What the next resume() begins.
  void begin(const std::function<void()>* function) {
    function_ = function;
    ended_ = false;
  }
  bool ended() const { return ended_; }

  /// Goes on until the function leaves or ends.
  void resume() {
    if (__tsan_get_current_fiber) other_.fiber = __tsan_get_current_fiber();
    change(other_, own_);
  }

  /// On the fiber: back to who resumed it.
  void leave() { change(own_, other_); }

 private:
  static constexpr size_t kStack = 256 << 10;

  struct Place {
    ucontext_t context;
    const void* stack;
    size_t bytes;
    void* fiber;  // the thread sanitizer's
  };

  /// Learns where the stack of the other place is when it is back.
  static void change(Place& from, Place& to) {
    void* kept = nullptr;
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.fiber, 0);
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&kept, to.stack, to.bytes);
    swapcontext(&from.context, &to.context);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(kept, &to.stack, &to.bytes);
  }

  static void enter(Fiber* self) {
    if (__sanitizer_finish_switch_fiber)
      __sanitizer_finish_switch_fiber(nullptr, &self->other_.stack, &self->other_.bytes);
    for (;;) {
      (*self->function_)();
      self->ended_ = true;
      self->leave();
    }
  }

  std::unique_ptr<std::byte[]> stack_{new std::byte[kStack]};
  Place own_, other_{};
  const std::function<void()>* function_ = nullptr;
  bool ended_ = true;
};

}  // namespace shardow::fake
