// A stack of its own to run on and to leave in the middle; the sanitizers are told of each change of stacks.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace shardow::fake {

/// Belongs to one thread. Its function never throws.
class Fiber {
 public:
  Fiber() {
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = kStack;
    own_.uc_link = nullptr;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
#if defined(__SANITIZE_THREAD__)
    tsan_own_ = __tsan_create_fiber(0);
#endif
  }
  ~Fiber() {
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(tsan_own_);
#endif
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// What the next resume() begins.
  void begin(const std::function<void()>* function) {
    function_ = function;
    ended_ = false;
  }
  bool ended() const {
    return ended_;
  }

  /// Goes on until the function leaves or ends.
  void resume() {
#if defined(__SANITIZE_THREAD__)
    tsan_other_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_own_, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* kept = nullptr;
    __sanitizer_start_switch_fiber(&kept, stack_.get(), kStack);
#endif
    swapcontext(&other_, &own_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
#endif
  }

  /// On the fiber: back to who resumed it.
  void leave() {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(tsan_other_, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* kept = nullptr;
    __sanitizer_start_switch_fiber(&kept, other_stack_, other_bytes_);
#endif
    swapcontext(&own_, &other_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(kept, &other_stack_, &other_bytes_);
#endif
  }

 private:
  static constexpr size_t kStack = 256 << 10;

  static void enter(unsigned high, unsigned low) {
    auto* const self = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &self->other_stack_, &self->other_bytes_);
#endif
    for (;;) {
      (*self->function_)();
      self->ended_ = true;
      self->leave();
    }
  }

  std::unique_ptr<std::byte[]> stack_{new std::byte[kStack]};
  ucontext_t own_{}, other_{};
  const std::function<void()>* function_ = nullptr;
  bool ended_ = true;
#if defined(__SANITIZE_ADDRESS__)
  const void* other_stack_ = nullptr;
  size_t other_bytes_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void *tsan_own_ = nullptr, *tsan_other_ = nullptr;
#endif
};

}  // namespace shardow::fake
