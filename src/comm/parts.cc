#include "comm/parts.h"

#include <string>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "comm/agree.h"
#include "comm/wire.h"

namespace shardow::comm {

namespace {

/// Bytes of all ranks, and whether all are done.
std::string sum_up(const std::vector<std::string>& parts) {
  int64_t bytes = 0;
  bool all_done = true;
  for (const std::string& one : parts) {
    Receiver in(one);
    bytes += in.number();
    all_done = in.number() != 0 && all_done;
  }
  Sender out;
  out.number(bytes);
  out.number(all_done ? 1 : 0);
  return out.bytes();
}

}  // namespace

void Parts::run(const std::function<Part()>& part) {
  bool here_done = false;
  const auto step = [&] {
    const Part found = here_done ? Part{0, true} : part();  // first: others may wait for what it sends
    here_done = found.last;
    tell();
    Sender out;
    out.number(found.bytes);
    out.number(found.last ? 1 : 0);
    return out.bytes();
  };
  for (bool all_done = false; !all_done;) {
    const std::string all = agree_on(group_, base::after(timeout_), step, sum_up);
    Receiver in(all);
    done_ += in.number();
    all_done = in.number() != 0;
  }
}

void Parts::tell() {
  if (!progress_ || group_.rank() != 0 || told_ == done_) return;
  told_ = done_;
  progress_(done_, total_);
}

}  // namespace shardow::comm
