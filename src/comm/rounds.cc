// Every rank counts the rounds that it has come to, so that a late rank meets the round it belongs to, decided as it
// is, rather than the one that the others are in. A round is kept until every member has come to it or is gone. One
// condition serves all rounds: groups are small.
#include "comm/rounds.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/errors.h"

namespace shardow::comm {
namespace {

size_t position(const Lane& lane, int rank) {
  return static_cast<size_t>(std::find(lane.members.begin(), lane.members.end(), rank) - lane.members.begin());
}

std::vector<int> missing(const Lane& lane, const std::vector<std::optional<std::string>>& calls) {
  std::vector<int> ranks;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (!calls[i]) ranks.push_back(lane.members[i]);
  }
  return ranks;
}

}  // namespace

std::shared_ptr<const Rounds::Bytes> Rounds::meet(int rank, const Lane& lane, Offer offer, Deadline deadline) {
  const base::Lock lock(mutex_);
  const Key key{lane, next_round_[static_cast<size_t>(rank)][lane]++};
  std::shared_ptr<Round>& kept = rounds_[key];
  if (!kept) kept = std::make_shared<Round>(lane.members.size());
  const std::shared_ptr<Round> round = kept;
  const std::string call = offer.call;
  if (!round->decided) arrive(lane, *round, rank, std::move(offer));
  while (!round->decided) {
    if (changed_.wait_until(mutex_, deadline) || round->decided) continue;
    decide(*round, did_not_come(call, missing(lane, round->calls)));
  }
  forget_finished(lane);
  if (round->failure) throw Error(round->failure->code, round->failure->message);
  return round->bytes;
}

void Rounds::leave(int rank) {
  const base::Lock lock(mutex_);
  gone_[static_cast<size_t>(rank)] = true;
  std::vector<Lane> lanes;
  for (const auto& [key, round] : rounds_) {
    if (position(key.lane, rank) == key.lane.members.size()) continue;
    if (!round->decided) fail_if_one_is_gone(key.lane, *round);
    if (lanes.empty() || lanes.back() != key.lane) lanes.push_back(key.lane);
  }
  for (const Lane& lane : lanes) forget_finished(lane);
}

void Rounds::arrive(const Lane& lane, Round& round, int rank, Offer offer) {
  const size_t at = position(lane, rank);
  round.calls[at] = std::move(offer.call);
  (*round.bytes)[at] = std::move(offer.bytes);
  fail_if_one_is_gone(lane, round);
  if (!round.decided && ++round.num_arrived == lane.members.size()) decide(round, std::nullopt);
}

/// Only members that have not come matter: one that came and left has done its part.
void Rounds::fail_if_one_is_gone(const Lane& lane, Round& round) {
  const auto came =
      std::find_if(round.calls.begin(), round.calls.end(), [](const auto& call) { return call.has_value(); });
  for (size_t i = 0; i < round.calls.size() && came != round.calls.end(); ++i) {
    if (round.calls[i] || !gone_[static_cast<size_t>(lane.members[i])]) continue;
    decide(round, is_gone(**came, lane.members[i]));
    return;
  }
}

void Rounds::decide(Round& round, std::optional<Failure> failure) {
  round.decided = true;
  round.failure = std::move(failure);
  changed_.notify_all();
}

void Rounds::forget_finished(const Lane& lane) {
  uint64_t oldest = std::numeric_limits<uint64_t>::max();  // that a member may still come to
  for (const int member : lane.members) {
    if (!gone_[static_cast<size_t>(member)]) oldest = std::min(oldest, next_round_[static_cast<size_t>(member)][lane]);
  }
  const auto first = rounds_.lower_bound(Key{lane, 0});
  auto last = first;
  while (last != rounds_.end() && last->first.lane == lane && last->first.number < oldest) ++last;
  rounds_.erase(first, last);
}

}  // namespace shardow::comm
