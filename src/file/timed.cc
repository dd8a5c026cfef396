#include "file/timed.h"

#include <typeinfo>

#include "base/turns.h"

namespace shardow::file {

std::unique_ptr<base::TimedCalls> timed_calls(const Group& group, std::chrono::milliseconds timeout) {
  const base::Syscalls& calls = base::syscalls();
  if (base::turns != nullptr || typeid(calls) != typeid(base::Syscalls)) return nullptr;
  return std::make_unique<base::TimedCalls>(group.size() > 1 ? timeout - timeout / 4 : timeout);
}

}  // namespace shardow::file
