#include "file/lanes.h"

#include <exception>
#include <thread>
#include <vector>

#include "base/files.h"
#include "base/turns.h"

namespace shardow::file {

void Lanes::run(size_t count, const std::function<void(size_t)>& work) {
  const auto guarded = [&](size_t lane) {
    try {
      work(lane);
    } catch (...) {
      const base::Lock lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      failed_ = true;
    }
  };
  base::Syscalls& here = base::syscalls();
  std::vector<std::thread> others;
  try {
    others.reserve(count);
    for (size_t lane = 1; lane < count && base::turns == nullptr; ++lane)
      others.emplace_back([&, lane] {
        const base::CallsTo too(&here);
        guarded(lane);
      });
  } catch (const std::exception&) {  // no more threads, or no memory for one: those that there are do it all
  }
  guarded(0);
  for (std::thread& other : others) other.join();
  const base::Lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace shardow::file
