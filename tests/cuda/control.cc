// The tests' side of the fake driver, in C++ and, by names of C, in Python.

#include <limits>
#include <utility>

#include "fake.h"

namespace shardow::fake {

std::function<void()> between;

World& world() {
  static World* const only = new World;  // never destroyed: engines free their memory at exit
  return *only;
}

std::unique_lock<std::mutex> locked() {
  return std::unique_lock(world().streams.mutex());
}

Work on_device(Work work) {
  if (world().options.guard) {
    work.part = [part = std::move(work.part)](size_t number, Random* random) {
      world().memory.protect(false);
      part(number, random);
      world().memory.protect(true);
    };
  }
  return work;
}

void reset(const Options& options) {
  world().streams.start(options.seed, options.threads);
  const auto lock = locked();
  static_cast<Session&>(world()) = Session{options};
  world().memory.start(options.guard);
}

void reset(int num_devices, int64_t seed) {
  const auto drawn = seed < 0 ? std::nullopt : std::optional(static_cast<uint64_t>(seed));
  reset({.num_devices = num_devices, .seed = drawn, .log = false});
}

std::vector<Call> calls_of(const std::string& what) {
  const auto lock = locked();
  std::vector<Call> named = world().log;
  std::erase_if(named, [&](const Call& call) { return call.what != what; });
  return named;
}

size_t allocated() {
  const auto lock = locked();
  return world().memory.allocated();
}

void* stream(int device, int number) {
  const auto lock = locked();
  void*& stream = world().users_streams[{device, number}];
  if (stream == nullptr) stream = world().streams.make(device);
  return stream;
}

void enqueue(int device, void* stream, std::function<void()> work) {
  const auto lock = locked();
  world().streams.add(device, stream, on_device({1, [work = std::move(work)](size_t, Random*) { work(); }}));
}

void follow(int device, void* stream, void* behind) {
  const auto lock = locked();
  const Mark mark = world().streams.at(device, behind).last;
  if (mark != nullptr && stream != behind) world().streams.add(device, stream, Work{}, {mark});
}

void run(void* stream, int device) {
  auto lock = locked();
  world().streams.until(lock, [mark = world().streams.at(device, stream).last] { return done(mark); });
}

void synchronize() {
  auto lock = locked();
  world().streams.until(lock, [] { return world().streams.pending() == 0; });
}

int64_t copied_to_host() {
  const auto lock = locked();
  return world().copied_to_host;
}

void fail_allocation(int number) {
  const auto lock = locked();
  world().until_allocation_fails = number;
}

void fail_copy(int number, int times) {
  const auto lock = locked();
  world().failing_from = world().num_copies + number;
  world().failing_to = times < 0 ? std::numeric_limits<int>::max() : world().failing_from + times;
}

}  // namespace shardow::fake
