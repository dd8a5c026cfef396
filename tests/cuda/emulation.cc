// A warp: 32 fibers, resumed in an order that the caller draws. Each goes on until it meets the others or ends; when
// all have arrived, whether they agree is put where all can read it, and the next round begins. Warps of a block know
// nothing of each other here, since no kernel of ours has blocks that meet.
#include "emulation.h"

#include <link.h>
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

// Null where this is built without that sanitizer.
#pragma weak __sanitizer_start_switch_fiber
#pragma weak __sanitizer_finish_switch_fiber
#pragma weak __tsan_create_fiber
#pragma weak __tsan_destroy_fiber
#pragma weak __tsan_get_current_fiber
#pragma weak __tsan_switch_to_fiber

namespace shardow::fake {
namespace {

constexpr unsigned kLanes = 32;

[[noreturn]] void refuse(const std::string& what) {
  give_up("a kernel on a device would go wrong: " + what + " (block " + std::to_string(blockIdx.x) + ", thread " +
          std::to_string(threadIdx.x) + ")");
}

/// A stack to run on and to leave in the middle; the sanitizers hear of each change of stacks. Belongs to one thread.
/// Its function never throws.
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

class Warp {
 public:
  void run(const std::function<void()>& body, unsigned first_thread, unsigned lanes, Random* random) {
    std::iota(order_.begin(), order_.end(), 0u);
    for (unsigned lane = 0; lane < lanes; ++lane) fibers_[lane].begin(&body);
    for (unsigned ended = 0; ended < lanes;) {
      if (random != nullptr) std::shuffle(order_.begin(), order_.begin() + lanes, *random);
      agree_ = true;
      for (unsigned i = 0; i < lanes; ++i) {
        lane_ = order_[i];
        threadIdx = {first_thread + lane_};
        if (!fibers_[lane_].ended()) fibers_[lane_].resume();
      }
      ended = 0;
      for (unsigned lane = 0; lane < lanes; ++lane) ended += fibers_[lane].ended() ? 1 : 0;
      if (ended > 0 && ended < lanes) refuse("a lane has ended that others wait for");
      if (ended == 0 && lanes < kLanes) refuse("a warp that is not full meets");
      if (ended == 0 && std::count(meetings_.begin(), meetings_.end(), meetings_[0]) != kLanes)
        refuse("lanes of a warp wait in different places");
      agreed_ = agree_;
    }
  }

  bool meet(Meeting meeting, bool agrees) {
    meetings_[lane_] = meeting;
    agree_ = agree_ && agrees;
    fibers_[lane_].leave();
    return agreed_;
  }

  static Warp& here() {
    static thread_local Warp warp;
    return warp;
  }

 private:
  std::array<Fiber, kLanes> fibers_;
  std::array<unsigned, kLanes> order_{};
  std::array<Meeting, kLanes> meetings_{};
  unsigned lane_ = 0;
  bool agree_ = true, agreed_ = true;  // in this round, in the one before
};

}  // namespace

void check_access(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) refuse("a misaligned address");
}

bool meet(Meeting meeting, unsigned mask, bool agrees) {
  if (mask != 0xffffffffu) refuse("a mask that is not the whole warp");
  return Warp::here().meet(meeting, agrees);
}

/// All that the kernels' library has of this thread's own.
std::span<std::byte> shared_memory() {
  std::span<std::byte> memory;
  const auto visit = [](dl_phdr_info* library, size_t, void* to) {
    if (std::strstr(library->dlpi_name, "fake_kernels") == nullptr) return 0;
    const auto* const end = library->dlpi_phdr + library->dlpi_phnum;
    const auto* const local =
        std::find_if(library->dlpi_phdr, end, [](const auto& part) { return part.p_type == PT_TLS; });
    *static_cast<std::span<std::byte>*>(to) = {static_cast<std::byte*>(library->dlpi_tls_data), local->p_memsz};
    return 1;
  };
  touch_shared_memory();
  ::dl_iterate_phdr(visit, &memory);
  return memory;
}

void run_block(unsigned grid, unsigned block, unsigned index, const std::function<void()>& body, Random* random) {
  static thread_local const std::span<std::byte> shared = shared_memory();
  std::fill(shared.begin(), shared.end(), std::byte{0xa5});
  gridDim = {grid};
  blockDim = {block};
  blockIdx = {index};
  std::vector<unsigned> warps((block + kLanes - 1) / kLanes);
  std::iota(warps.begin(), warps.end(), 0u);
  if (random != nullptr) std::shuffle(warps.begin(), warps.end(), *random);
  for (const unsigned warp : warps)
    Warp::here().run(body, warp * kLanes, std::min(kLanes, block - warp * kLanes), random);
}

}  // namespace shardow::fake
