#include "file/lanes.h"

#include <exception>
#include <thread>
#include <vector>

#include "base/turns.h"
#include "file/environment.h"

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
  const Environment here = environment_here();
  std::vector<std::thread> others;
  try {
    others.reserve(count);
    for (size_t lane = 1; lane < count && base::turns == nullptr; ++lane)
      others.emplace_back([&, lane] {
        const InEnvironment too(&here);
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
