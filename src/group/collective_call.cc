#include "group/collective_call.h"

#include <string>
#include <utility>
#include <vector>

#include "group/wire.h"

namespace shardow::group {
namespace {

/// Nothing where all texts are empty: a round of ranks that have no words costs less.
std::string packed(const std::vector<std::string>& texts) {
  Sender out;
  for (const std::string& text : texts) out.text(text);
  return out.bytes().size() > texts.size() * sizeof(int64_t) ? out.bytes() : std::string();
}

/// `count` texts; those that are not there are empty.
std::vector<std::string> unpacked(const std::string& packed, size_t count) {
  std::vector<std::string> texts(count);
  size_t next = 0;
  for (Receiver in(packed); !in.done() && next < count; ++next) texts[next] = in.text();
  return texts;
}

}  // namespace

std::string Joint::words() {
  std::vector<std::string> words;
  for (Comparison* part : parts_) words.push_back(part->words());
  return packed(words);
}

std::string Joint::sum_up(const std::vector<std::string>& by_rank) const {
  std::vector<std::vector<std::string>> by_part(parts_.size());
  for (const std::string& words : by_rank) {
    std::vector<std::string> texts = unpacked(words, parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) by_part[i].push_back(std::move(texts[i]));
  }
  std::vector<std::string> totals;
  for (size_t i = 0; i < parts_.size(); ++i) totals.push_back(parts_[i]->sum_up(by_part[i]));
  return packed(totals);
}

void Joint::take(CollectiveCall& call, const std::string& total) {
  const std::vector<std::string> totals = unpacked(total, parts_.size());
  for (size_t i = 0; i < parts_.size(); ++i) parts_[i]->take(call, totals[i]);
}

std::string CollectiveCall::step(const std::function<std::string()>& step, const SumUp& sum_up) const {
  return agree_on(
      group_, [this] { return deadline(); }, step, sum_up);
}

void CollectiveCall::compare(const Prepare& prepare) {
  Joint joint;
  const auto words = [&] {
    joint = Joint(prepare());
    return joint.words();
  };
  joint.take(*this, step(words, [&](const auto& by_rank) { return joint.sum_up(by_rank); }));
}

void CollectiveCall::work(int64_t total_bytes, const std::function<Part()>& part, const Prepare& last) {
  total_ = total_bytes;
  done_ = 0;
  told_ = -1;
  bool here_done = false;
  Joint joint;
  std::string brought;
  const auto part_words = [&] {
    const Part made = here_done ? Part{0, true} : part();  // first: others may wait for what it sends
    if (made.last && !here_done && last) {
      joint = Joint(last());
      brought = joint.words();
    }
    here_done = made.last;
    tell_progress();
    return numbers_and_text({made.bytes, made.last ? 1 : 0}, brought);
  };
  const auto sum_up = [&](const std::vector<std::string>& by_rank) {
    int64_t bytes = 0;
    bool all_done = true;
    std::vector<std::string> all_brought;
    for (const std::string& words : by_rank) {
      Receiver in(words);
      bytes += in.number();
      all_done = in.number() != 0 && all_done;
      all_brought.push_back(in.text());
    }
    return numbers_and_text({bytes, all_done ? 1 : 0}, all_done ? joint.sum_up(all_brought) : std::string());
  };
  for (bool all_done = false; !all_done;) {
    const std::string all = step(part_words, sum_up);
    Receiver in(all);
    done_ += in.number();
    all_done = in.number() != 0;
    if (all_done) joint.take(*this, in.text());
  }
}

void CollectiveCall::tell_progress() {
  if (!progress_ || rank() != 0 || told_ == done_) return;
  told_ = done_;
  progress_(done_, total_);
}

}  // namespace shardow::group
