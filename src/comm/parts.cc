#include "comm/parts.h"

#include <string>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "comm/agree.h"
#include "comm/wire.h"

namespace shardow::comm {

namespace {

/// Bytes of all ranks, whether all are done, and the words of those that have some.
std::string sum_up(const std::vector<std::string>& parts) {
  int64_t bytes = 0;
  bool all_done = true;
  Sender words;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    Receiver in(parts[rank]);
    bytes += in.number();
    all_done = in.number() != 0 && all_done;
    if (in.done()) continue;
    words.number(static_cast<int64_t>(rank));
    words.text(in.text());
  }
  Sender out;
  out.number(bytes);
  out.number(all_done ? 1 : 0);
  return out.bytes() + words.bytes();
}

}  // namespace

std::vector<std::string> Parts::run(const std::function<Part()>& part) {
  std::vector<std::string> words(static_cast<size_t>(group_.size()));
  bool here_done = false;
  const auto step = [&] {
    const Part found = here_done ? Part{0, true} : part();  // first: others may wait for what it sends
    here_done = found.last;
    tell();
    Sender out;
    out.number(found.bytes);
    out.number(found.last ? 1 : 0);
    if (!found.words.empty()) out.text(found.words);
    return out.bytes();
  };
  for (bool all_done = false; !all_done;) {
    const std::string all = agree_on(group_, base::now() + timeout_, step, sum_up);
    Receiver in(all);
    done_ += in.number();
    all_done = in.number() != 0;
    while (!in.done()) {
      const auto rank = static_cast<size_t>(in.number());
      words.at(rank) = in.text();
    }
  }
  return words;
}

void Parts::tell() {
  if (!progress_ || group_.rank() != 0 || told_ == done_) return;
  told_ = done_;
  progress_(done_, total_);
}

}  // namespace shardow::comm
