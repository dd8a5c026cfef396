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
#endif
    change(other_, own_, stack_.get(), kStack, tsan_own_, nullptr, nullptr);
  }

  /// On the fiber: back to who resumed it.
  void leave() {
    change(own_, other_, other_stack_, other_bytes_, tsan_other_, &other_stack_, &other_bytes_);
  }

 private:
  static constexpr size_t kStack = 256 << 10;

  /// From one context to another one, whose stack that is; when it is back, `stack` and `bytes` are where it comes
  /// from.
  static void change(ucontext_t& from, ucontext_t& to, [[maybe_unused]] const void* to_stack,
                     [[maybe_unused]] size_t to_bytes, [[maybe_unused]] void* to_fiber,
                     [[maybe_unused]] const void** stack, [[maybe_unused]] size_t* bytes) {
    [[maybe_unused]] void* kept = nullptr;
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to_fiber, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&kept, to_stack, to_bytes);
#endif
    swapcontext(&from, &to);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(kept, stack, bytes);
#endif
  }

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
  const void* other_stack_ = nullptr;
  size_t other_bytes_ = 0;
  void *tsan_own_ = nullptr, *tsan_other_ = nullptr;
};

}  // namespace shardow::fake
