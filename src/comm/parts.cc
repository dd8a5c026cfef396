#include "comm/parts.h"

#include <string>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "comm/agree.h"
#include "comm/wire.h"

namespace shardow::comm {

std::vector<std::string> Parts::run(const std::function<Part()>& part) {
  std::vector<std::string> words(static_cast<size_t>(group_.size()));
  bool here_done = false;
  for (bool all_done = false; !all_done;) {
    const std::vector<std::string> parts = agree_on(group_, base::now() + timeout_, [&] {
      const Part found = here_done ? Part{0, true} : part();  // first: others may wait for what it sends
      here_done = found.last;
      tell();
      Sender out;
      out.number(found.bytes);
      out.number(found.last ? 1 : 0);
      out.text(found.words);
      return out.bytes();
    });
    all_done = true;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      Receiver in(parts[rank]);
      done_ += in.number();
      all_done = in.number() != 0 && all_done;
      if (std::string told = in.text(); !told.empty()) words[rank] = std::move(told);
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
