// By a seed: each step takes one part of the first operation of one stream whose operation waits for nothing, both
// drawn. A stream may be stalled for a number of steps, so that the others get far ahead. How much is done at a call of
// the driver is drawn too; some seeds are so lazy that nothing happens before the host waits.
//
// The default stream of a device and its blocking streams wait for each other, as CUDA has it.
#include "streams.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "fake.h"

namespace shardow::fake {
namespace {

bool done(const MarkPtr& mark) {
  return mark == nullptr || mark->done;
}

}  // namespace

void Streams::start(std::optional<uint64_t> seed, bool threads) {
  stop();
  streams_.clear();
  random_.reset();
  if (seed) random_.emplace(*seed);
  eagerness_ = random_ ? static_cast<unsigned>((*random_)() % 4) : 0;
  threads_ = threads;
  ending_ = false;
  until_broken = -1;
}

void Streams::stop() {
  {
    std::unique_lock lock(mutex_);
    if (!threads_) everything();
    ending_ = true;
    for (Stream& stream : streams_) stream.changed.notify_all();
  }
  for (Stream& stream : streams_) {
    if (stream.thread.joinable()) stream.thread.join();
  }
}

/// A device's default stream is there when it is first used.
Streams::Stream& Streams::find(int device, void* handle) {
  for (Stream& stream : streams_) {
    if (stream.handle == handle && (handle != nullptr || stream.device == device)) return stream;
  }
  if (handle == nullptr) return begin(device, nullptr, true);
  std::fprintf(stderr, "a stream that is gone, or was never made\n");
  std::abort();
}

Streams::Stream& Streams::begin(int device, void* handle, bool blocking) {
  Stream& stream = streams_.emplace_back();
  stream.device = device;
  stream.handle = handle;
  stream.blocking = blocking;
  if (threads_) stream.thread = std::thread([this, &stream] { work(stream); });
  return stream;
}

void* Streams::make(int device, bool blocking) {
  return begin(device, reinterpret_cast<void*>(last_handle_ += 16), blocking).handle;
}

bool Streams::retire(void* handle) {
  const auto stream =
      std::find_if(streams_.begin(), streams_.end(), [&](const Stream& known) { return known.handle == handle; });
  if (handle == nullptr || stream == streams_.end()) return false;
  stream->handle = &*stream;
  return true;
}

std::optional<Streams::Kind> Streams::kind_of(void* handle) const {
  for (const Stream& stream : streams_) {
    if (stream.handle == handle) return Kind{stream.device, stream.blocking};
  }
  return std::nullopt;
}

MarkPtr Streams::add(int device, void* handle, Work work, std::vector<MarkPtr> after) {
  Stream& stream = find(device, handle);
  for (const Stream& other : streams_) {
    const bool meet = other.device == stream.device && other.blocking && stream.blocking &&
                      (handle == nullptr) != (other.handle == nullptr);
    if (meet && !done(other.last)) after.push_back(other.last);
  }
  Operation operation{std::move(work), std::move(after), std::make_shared<Mark>(), {}};
  operation.order.resize(operation.work.parts);
  std::iota(operation.order.begin(), operation.order.end(), size_t{0});
  if (random_) {
    std::shuffle(operation.order.begin(), operation.order.end(), *random_);
    if ((*random_)() % 16 == 0) stream.stalled = static_cast<int>((*random_)() % 200);
  }
  stream.last = operation.mark;
  const MarkPtr mark = operation.mark;
  stream.queue.push_back(std::move(operation));
  if (threads_) {
    stream.changed.notify_all();
  } else if (!random_) {
    everything();
  }
  return mark;
}

MarkPtr Streams::last(int device, void* handle) {
  return find(device, handle).last;
}

std::vector<MarkPtr> Streams::all(std::optional<int> device) const {
  std::vector<MarkPtr> marks;
  for (const Stream& stream : streams_) {
    if (!device || stream.device == *device) marks.push_back(stream.last);
  }
  return marks;
}

bool Streams::ready(const Stream& stream) {
  return !stream.queue.empty() &&
         std::all_of(stream.queue.front().after.begin(), stream.queue.front().after.end(), done);
}

/// One part. After a failure nothing is done any more, but ends.
void Streams::advance(Stream& stream) {
  Operation& first = stream.queue.front();
  if (first.work.part && !first.order.empty() && !broken()) {
    first.work.part(first.order.back(), random_ ? &*random_ : nullptr);
    first.order.pop_back();
    if (!first.order.empty()) return;
  }
  end(stream);
}

void Streams::end(Stream& stream) {
  if (stream.queue.front().work.part && until_broken > 0) --until_broken;
  stream.queue.front().mark->done = true;
  stream.queue.pop_front();
}

/// False where nothing can be done.
bool Streams::advance_one() {
  std::vector<Stream*> able;
  for (Stream& stream : streams_) {
    if (ready(stream)) able.push_back(&stream);
  }
  if (able.empty()) return false;
  Stream& stream = *able[random_ ? (*random_)() % able.size() : 0];
  if (stream.stalled > 0) {
    --stream.stalled;
  } else {
    advance(stream);
  }
  return true;
}

void Streams::some(std::unique_lock<std::mutex>& lock) {
  if (random_ && !threads_) {
    const auto most = uint64_t{1} << (2 * eagerness_);  // 1, 4, 16, 64
    for (uint64_t number = (*random_)() % most; number > 0 && advance_one(); --number) {
    }
  }
  static_cast<void>(pass(lock));
}

bool Streams::pass(std::unique_lock<std::mutex>& lock) {
  if (!between) return false;
  lock.unlock();
  between();
  lock.lock();
  return true;
}

void Streams::until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& holds) {
  if (threads_) return done_.wait(lock, holds);
  while (!holds()) {
    const bool moved = advance_one();
    if (!pass(lock) && !moved && !holds()) {
      std::fprintf(stderr, "the host waits for what never comes: streams wait for each other\n");
      std::abort();
    }
  }
}

void Streams::everything() {
  for (bool moved = true; moved;) {
    moved = false;
    for (Stream& stream : streams_) {
      while (ready(stream)) {
        advance(stream);
        moved = true;
      }
    }
  }
}

size_t Streams::pending() const {
  size_t number = 0;
  for (const Stream& stream : streams_) number += stream.queue.size();
  return number;
}

bool Streams::uses(uint64_t block) const {
  return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& stream) {
    return std::any_of(stream.queue.begin(), stream.queue.end(), [&](const Operation& operation) {
      const auto& blocks = operation.work.blocks;
      return block != 0 && std::find(blocks.begin(), blocks.end(), block) != blocks.end();
    });
  });
}

/// A stream's thread. Operations are carried out with nothing locked, so that the sanitizer sees what meets.
void Streams::work(Stream& stream) {
  std::unique_lock lock(mutex_);
  for (;;) {
    stream.changed.wait(lock, [&] { return ready(stream) || (ending_ && stream.queue.empty()); });
    if (stream.queue.empty()) return;
    const Operation& first = stream.queue.front();
    const bool works = first.work.part && !broken();
    lock.unlock();
    for (size_t part = 0; works && part < first.work.parts; ++part) first.work.part(part, nullptr);
    lock.lock();
    end(stream);
    done_.notify_all();
    for (Stream& other : streams_) other.changed.notify_all();
  }
}

}  // namespace shardow::fake
