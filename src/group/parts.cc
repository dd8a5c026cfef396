#include "group/parts.h"

#include <string>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "group/agree.h"
#include "group/wire.h"

namespace shardow::group {

namespace {

/// Bytes of all ranks, and whether all are done; then what they have brought for that is compared.
std::string sum_up(const std::vector<std::string>& parts, const SumUp& compare) {
  int64_t bytes = 0;
  bool all_done = true;
  std::vector<std::string> brought;
  for (const std::string& one : parts) {
    Receiver in(one);
    bytes += in.number();
    all_done = in.number() != 0 && all_done;
    brought.push_back(in.text());
  }
  if (all_done && compare) compare(brought);
  Sender out;
  out.number(bytes);
  out.number(all_done ? 1 : 0);
  return out.bytes();
}

}  // namespace

void Parts::run(const std::function<Part()>& part, const Comparison& last) {
  bool here_done = false;
  std::string brought;
  const auto step = [&] {
    const Part found = here_done ? Part{0, true} : part();  // first: others may wait for what it sends
    if (found.last && !here_done && last.words) brought = last.words();
    here_done = found.last;
    tell();
    Sender out;
    out.number(found.bytes);
    out.number(found.last ? 1 : 0);
    out.text(brought);
    return out.bytes();
  };
  const auto sum_up_all = [&](const std::vector<std::string>& parts) { return sum_up(parts, last.sum_up); };
  for (bool all_done = false; !all_done;) {
    const std::string all = agree_on(group_, base::after(timeout_), step, sum_up_all);
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

}  // namespace shardow::group
