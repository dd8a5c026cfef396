// The tests' side of the fake driver, in C++ and (at the end) in C, for ctypes.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "emulation.h"
#include "world.h"

namespace shardow::fake {

std::function<void()> between;

World& world() {
  static World* const only = [] {
    auto* const made = new World;  // never destroyed: engines free their memory at exit
    made->memory.start(false);
    return made;
  }();
  return *only;
}

void World::note(const char* what, void* stream, const void* subject) {
  if (!options.log) return;
  Call& call = log.emplace_back();
  call.what = what;
  call.device = current_device();
  call.stream = stream;
  call.subject = subject;
}

std::unique_lock<std::mutex> called() {
  std::unique_lock lock(world().streams.mutex());
  world().streams.some(lock);
  return lock;
}

Result state() {
  return world().streams.until_broken == 0 ? kIllegalAddress : kSuccess;
}

Work on_device(Work work) {
  if (world().options.guard) {
    work.part = [part = std::move(work.part)](size_t number, Random* random) {
      const Memory::Open open(world().memory);
      part(number, random);
    };
  }
  return work;
}

bool capturing(void* stream) {
  return world().captures.count(stream) > 0;
}

void reset(const Options& options) {
  world().streams.stop();
  world().streams.start(options.seed, options.threads);
  const std::lock_guard lock(world().streams.mutex());
  world().options = options;
  world().log.clear();
  world().contexts.clear();
  world().until_allocation_fails = world().until_copy_fails = -1;
  world().times = 0;
  world().drops_waits = false;
  world().copied = {};
  world().captures.clear();
  world().users_streams.clear();
  world().memory.start(options.guard);
}

std::vector<Call> calls() {
  const std::lock_guard lock(world().streams.mutex());
  return world().log;
}

std::vector<Call> calls_of(const std::string& what) {
  std::vector<Call> named = calls();
  std::erase_if(named, [&](const Call& call) { return call.what != what; });
  return named;
}

void clear() {
  const std::lock_guard lock(world().streams.mutex());
  world().log.clear();
}

std::vector<int> contexts() {
  const std::lock_guard lock(world().streams.mutex());
  return {world().contexts.begin(), world().contexts.end()};
}

size_t allocated() {
  const std::lock_guard lock(world().streams.mutex());
  return world().memory.allocated();
}

void* stream(int device, int number) {
  const std::lock_guard lock(world().streams.mutex());
  void*& stream = world().users_streams[{device, number}];
  if (stream == nullptr) stream = world().streams.make(device, false);
  return stream;
}

void capture(void* stream, bool begins) {
  const std::lock_guard lock(world().streams.mutex());
  if (begins) {
    world().captures[stream] =
        std::make_shared<Capture>(Capture{{}, stream, kGlobal, std::this_thread::get_id(), false});
  } else {
    world().captures.erase(stream);
  }
}

void run_kernel(unsigned threads, const std::function<void()>& body) {
  run_block(1, threads, 0, body, nullptr);
}

void enqueue(int device, void* stream, std::function<void()> work) {
  const std::lock_guard lock(world().streams.mutex());
  world().streams.add(device, stream, on_device({1, [work = std::move(work)](size_t, Random*) { work(); }}));
}

void follow(int device, void* stream, void* behind) {
  const std::lock_guard lock(world().streams.mutex());
  const MarkPtr mark = world().streams.last(device, behind);
  if (mark != nullptr && stream != behind) world().streams.add(device, stream, Work{}, {mark});
}

void fetch(void* to, const void* from, size_t bytes, int device, void* stream) {
  if (bytes == 0) return;
  std::unique_lock lock(world().streams.mutex());
  const Work work = on_device({1, [=](size_t, Random*) { std::memcpy(to, from, bytes); }});
  const MarkPtr mark = world().streams.add(device, stream, work);
  world().streams.until(lock, [&] { return mark->done; });
}

void run(int device, void* stream) {
  std::unique_lock lock(world().streams.mutex());
  const MarkPtr mark = world().streams.last(device, stream);
  if (mark == nullptr) return;
  if (world().options.threads) {
    world().streams.until(lock, [&] { return mark->done; });
  } else {
    world().streams.only(mark);
  }
}

void synchronize() {
  std::unique_lock lock(world().streams.mutex());
  if (world().options.threads) {
    world().streams.until(lock, [] { return world().streams.pending() == 0; });
  } else {
    world().streams.everything();
  }
}

size_t pending() {
  const std::lock_guard lock(world().streams.mutex());
  return world().streams.pending();
}

Copied copied() {
  const std::lock_guard lock(world().streams.mutex());
  return world().copied;
}

void fail_allocation(int number) {
  const std::lock_guard lock(world().streams.mutex());
  world().until_allocation_fails = number;
}

void fail_copy(int number, int times) {
  const std::lock_guard lock(world().streams.mutex());
  world().until_copy_fails = number;
  world().times = times;
}

bool broken() {
  const std::lock_guard lock(world().streams.mutex());
  return world().streams.until_broken == 0;
}

void drop_waits(bool dropped) {
  const std::lock_guard lock(world().streams.mutex());
  world().drops_waits = dropped;
}

void break_after(int operations) {
  const std::lock_guard lock(world().streams.mutex());
  world().streams.until_broken = operations;
}

}  // namespace shardow::fake

#pragma GCC visibility push(default)
extern "C" {

void fake_reset(int num_devices, int64_t seed) {
  using namespace shardow::fake;
  const auto drawn = seed < 0 ? std::nullopt : std::optional(static_cast<uint64_t>(seed));
  reset({.num_devices = num_devices, .seed = drawn, .log = false});
}
void* fake_stream(int device, int number) {
  return shardow::fake::stream(device, number);
}
void fake_run(void* stream, int device) {
  shardow::fake::run(device, stream);
}
void fake_synchronize() {
  shardow::fake::synchronize();
}
size_t fake_pending() {
  return shardow::fake::pending();
}
void fake_fail_copy(int number, int times) {
  shardow::fake::fail_copy(number, times);
}
void fake_fail_allocation(int number) {
  shardow::fake::fail_allocation(number);
}
size_t fake_allocated() {
  return shardow::fake::allocated();
}
int64_t fake_copied_to_host() {
  return shardow::fake::copied().to_host;
}
int64_t fake_copied_to_device() {
  return shardow::fake::copied().to_device;
}
}
