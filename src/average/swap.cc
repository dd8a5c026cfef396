// A swap is a transaction. Its SwapRecord is written after each step, so that the way back depends on the record alone:
//   1. a round: all ranks are ready, and have the memory for all that is kept aside
//   2. own parts exchange in place, one view after the other, on a device as many as a launch takes; weights of other
//      dtypes are kept aside and receive converted averages
//   3. where replicas divide, a round: all of them have exchanged their parts. If a rank failed, all of them go back
//   4. where replicas divide, `shared` is set, and they send each other the parts that they own
//   --- the averages are in the weights' memory ---
//   5. a round: each rank sends its error, if any, and whether it needs parts that others own. All of them wait, until
//      the deadline. Without replicas step 6 comes first, and a rank that failed sends its error without waiting
//   6. own parts are taken back, from the last view exchanged, to the weights' present memory
//   7. where any rank has shared, a round: all ranks have taken theirs back
//   8. replicas send each other their parts again: their weights are equal, so the owner's part restores those of all
// A swap may be stopped between any two steps, by anything: the way back goes on from the record. A failure in steps 2
// to 4 begins it at once.
#include "average/swap.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

#include "average/checks.h"
#include "base/errors.h"
#include "base/turns.h"
#include "group/collective_call.h"
#include "group/facts.h"
#include "group/ranks.h"
#include "group/rounds.h"
#include "group/wire.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using base::fail;
using kernels::Direction;
using kernels::Memory;
using std::chrono::milliseconds;

TensorView memory_as(const TensorView& view, const Memory& memory) {
  TensorView kept = view;
  kept.data = memory.data();
  return kept;
}

void step_done() {
  if (swap_seam != nullptr) swap_seam();
}

/// Returns an exception of this rank as an error of all ranks.
Error error_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return {Code::kInternal, error.what()};
  } catch (...) {
    return {Code::kInternal, "interrupted"};
  }
}

Ends ends_of(const std::string& words) {
  if (words.empty()) return {};
  group::Receiver in(words);
  const bool shared = in.number() != 0, refused = in.number() != 0;
  return {shared, refused, in.text()};
}

group::Ranks::Decision sum_up(const std::vector<std::string>& by_rank) {
  constexpr size_t kMostNamed = 8;
  Ends all;
  std::vector<std::string> failures;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto [shared, refused, did] = ends_of(by_rank[rank]);
    if (refused && !all.refused) failures.clear();
    if (!did.empty() && failures.size() < kMostNamed && refused >= all.refused)
      failures.push_back(fmt::format("rank {} {}", rank, did));
    all.shared |= shared;
    all.refused |= refused;
  }
  return {group::numbers_and_text({all.shared, all.refused}, fmt::format("{}", fmt::join(failures, "; ")))};
}

/// Makes step 5. `failure`: the error that ended this rank's block, or, with `refuses`, why it can't put its weights
/// back. A rank that restores meets those that were leaving: they learn that they must restore too, and come once more.
Ends meet(const Leaving& leaving, const SwapRanks& ranks, bool shared, const std::string& failure, bool refuses,
          milliseconds patience) {
  if (ranks.group == nullptr || ranks.group->size() == 1) return {};
  group::Ranks& rounds = group::ranks_of(*ranks.group);
  const std::string call = leaving.call + ranks.whose;
  const std::string did = failure.empty() ? "" : "left swapped() with " + failure;
  const std::string own = shared || !did.empty() ? group::numbers_and_text({shared, refuses}, did) : "";
  const Deadline deadline = base::after(ranks.divided || failure.empty() ? patience : milliseconds(0));
  for (bool again = leaving.restores;; again = false) {
    leaving.restores ? rounds.begin(call, ranks.timeout) : rounds.begin_together(call, ranks.timeout, did);
    try {
      return ends_of(rounds.decide(own, sum_up, deadline).common);
    } catch (const Error& error) {
      if (!ranks.divided && !failure.empty()) return {};  // the others may come later
      const bool others_leave = std::string_view(error.what()).find("calls leaving swapped()") != std::string::npos;
      if (!again || error.code() != Code::kInvalidArgument || !others_leave) throw;
    }
  }
}

}  // namespace

/// Takes the weights back as far as the record says that the swap came. Replicas have no part in it: only this rank's
/// parts come back.
Swap::~Swap() {
  if (!record_ || abandoned_) return;
  try {
    exchange_out();
  } catch (...) {  // a device is lost, and no caller is left to report it to
  }
}

void Swap::refuse(const char* what) const {
  if (record_) fail(Code::kInvalidArgument, "{}; swap back first", what);
}

void Swap::set_stream(int index, void* stream) {
  if (!record_) return;
  follow(record_->weights, index, stream);
}

/// Weights of C++ callers, at the addresses where they were swapped.
class Swap::OwnMemory final : public WeightsMemory {
 public:
  explicit OwnMemory(Swap& swap) : swap_(swap) {}

  /// Prepares the exchange of a rank whose own swap failed early: the other ranks need it.
  std::vector<TensorView> places(bool /*strict*/) override {
    Group* const replicas = swap_.storage_.options.replicas;
    if (!swap_.record_ && replicas != nullptr)
      own_ = std::make_unique<ReplicaExchange>(*replicas, swap_.storage_.whole());
    return {};
  }

  void exchange(const std::function<void()>& writes, Deadline deadline) override {
    writes();
    Group& replicas = *swap_.storage_.options.replicas;
    (swap_.record_ ? swap_.record_->exchange : own_)->run(replicas, deadline);
  }

 private:
  Swap& swap_;
  std::unique_ptr<ReplicaExchange> own_;
};

SwapRanks Swap::own_ranks() const {
  Group* const replicas = storage_.options.replicas;
  return {replicas, replicas != nullptr, storage_.options.timeout};
}

void Swap::in(std::span<const TensorView> weights, size_t k) {
  std::optional<SwapRecord> prepared;
  if (Group* const replicas = storage_.options.replicas; replicas != nullptr) {
    replicas->begin("swap_in()", storage_.options.timeout);
    std::optional<group::EqualFacts> facts;
    group::CollectiveCall(*replicas, storage_.options.timeout).compare([&] {
      prepared = prepare(weights, k);
      return group::Comparisons{&facts.emplace("swap_in()", swap_facts(k, clock_.counters.updates, weights))};
    });
  } else {
    prepared = prepare(weights, k);
  }
  OwnMemory own(*this);
  try {
    enter(std::move(*prepared), own, own_ranks());
  } catch (...) {
    const std::exception_ptr first = std::current_exception();
    try {
      leave({"swap_in()", error_of(first).what(), true}, own, own_ranks());
    } catch (...) {  // the record stays, and swap_out() goes on from it; the caller gets the first failure
    }
    std::rethrow_exception(first);
  }
}

void Swap::out() {
  OwnMemory own(*this);
  leave({"swap_out()"}, own, own_ranks());
}

/// Makes step 1 on this rank: all that could be refused, and all memory.
SwapRecord Swap::prepare(std::span<const TensorView> weights, size_t k) const {
  const ConcurrentUseCheck::Use use(user_, "swap_in()");
  const std::vector<std::vector<TensorView>>& averages = storage_.averages;
  if (k >= averages.size()) fail(Code::kInvalidArgument, "swap_in({}): there are {} averages", k, averages.size());
  check_swappable(storage_.whole(), weights);
  updater_.wait();
  if (record_) fail(Code::kInvalidArgument, "swap_in({}): average {} is swapped in; swap it out first", k, record_->k);
  SwapRecord prepared{k, storage_.divide(weights), std::vector<Memory>(weights.size())};
  if (storage_.options.replicas != nullptr)
    prepared.exchange = std::make_unique<ReplicaExchange>(*storage_.options.replicas, weights);
  for (size_t i = 0; i < weights.size(); ++i) {
    const TensorView& part = prepared.weights[i];
    if (is_other(part) || kernels::swaps_in_place(part.dtype, storage_.options.dtype)) continue;
    prepared.kept[i] = Memory(static_cast<size_t>(byte_size(part.dtype, part.region.size())), averages[k][i].device);
    step_done();
  }
  constexpr size_t kAll = std::numeric_limits<size_t>::max();
  const auto most = [&](size_t i) {  // weights like this one that are exchanged in one call
    const TensorView &weight = prepared.weights[i], &average = averages[k][i];
    return is_offloaded(weight, average) ? kAll : most_swapped(weight, average);
  };
  for (size_t first = 0, end = 0; first < weights.size(); first = end) {
    const int index = prepared.weights[first].device.index;
    const auto joins = [&](size_t i) { return most(i) == most(first) && prepared.weights[i].device.index == index; };
    for (end = first + 1; end < weights.size() && end - first < most(first) && joins(end);) ++end;
    prepared.steps.push_back({first, end, nullptr});
    if (most(first) == kAll)
      prepared.steps.back().ring = std::make_unique<RingSwap>(storage_.ring_of(index), prepared.weights, first, end);
  }
  return prepared;
}

/// Makes steps 2 to 4.
void Swap::enter(SwapRecord prepared, WeightsMemory& model, const SwapRanks& ranks) {
  record_ = std::move(prepared);
  const auto exchange_own = [&] {
    const ConcurrentUseCheck::Use use(user_, "swap_in()");
    exchange_in();
    model.scatter();
  };
  if (ranks.divided) {
    agree(*ranks.group, base::after(ranks.timeout), exchange_own);
    record_->entered = true;
    try {
      model.exchange([&] { record_->shared = true; }, base::after(ranks.timeout));
    } catch (const Error& error) {
      record_->waited = group::is_about_others(error.code());
      throw;
    }
  } else {
    exchange_own();
  }
  model.written();
}

/// Makes steps 5 to 8. Replicas that go back from step 3 do so together, and need no round for it.
void Swap::leave(const Leaving& leaving, WeightsMemory& model, const SwapRanks& ranks) {
  const bool from_step_3 = leaving.enters && !(record_ && record_->entered);
  const Ends ends =
      ranks.divided && !from_step_3 ? leave_together(leaving, model, ranks) : leave_alone(leaving, model, ranks);
  if (leaving.error.empty() && !ends.failures.empty())
    throw Error(Code::kPeerFailed, ends.failures + ". The weights are back on this rank");
}

Ends Swap::leave_alone(const Leaving& leaving, WeightsMemory& model, const SwapRanks& ranks) {
  std::exception_ptr refusal;
  std::string failure = leaving.error;
  try {
    if (record_) put_back(model.places(leaving.strict), model);
  } catch (const group::Interruption&) {
    throw;
  } catch (...) {
    refusal = std::current_exception();
    const std::string why = error_of(refusal).what();
    if (record_) record_->why = why;
    if (failure.empty()) failure = why;
  }
  Ends ends;
  if (!ranks.divided && !leaving.restores) ends = meet(leaving, ranks, false, failure, false, ranks.timeout);
  if (refusal) std::rethrow_exception(refusal);
  return ends;
}

Ends Swap::leave_together(const Leaving& leaving, WeightsMemory& model, const SwapRanks& ranks) {
  std::vector<TensorView> places;
  std::optional<Error> refusal;
  try {
    places = model.places(leaving.strict);
  } catch (const group::Interruption&) {
    throw;
  } catch (...) {
    refusal = error_of(std::current_exception());
  }
  const bool shared = record_ && record_->shared;
  Ends ends;
  try {
    // A rank that waited for another in vain does not wait a second time as long.
    const bool waited = leaving.enters && record_->waited;
    ends = meet(leaving, ranks, shared, refusal ? refusal->what() : leaving.error, refusal.has_value(),
                waited ? std::min<milliseconds>(ranks.timeout, group::kToTell) : ranks.timeout);
  } catch (const Error& missing) {
    if (shared) stay(leaving, missing);
    put_back(places, model);
    throw;
  }
  if (ends.refused) stay(leaving, refusal ? *refusal : Error(Code::kPeerFailed, ends.failures));
  if (!ends.shared) {
    put_back(places, model);
    return ends;
  }
  try {
    agree(*ranks.group, base::after(ranks.timeout), [&] { take_back(places, model); });
    model.exchange([] {}, base::after(ranks.timeout));
    finish(model);
  } catch (const Error& lost) {
    if (record_) stay(leaving, lost);
    throw;
  }
  return ends;
}

/// Throws `error`, and records it as the reason why the averages are still in the weights' memory, if they are.
void Swap::stay(const Leaving& leaving, const Error& error) {
  const std::string text = error.what();
  const std::string why = text.starts_with(leaving.call) ? text : fmt::format("{}: {}", leaving.call, text);
  if (record_) record_->why = why;
  throw Error(error.code(), why, error.os_errno());
}

/// Makes step 6, where no other rank is needed.
void Swap::put_back(std::span<const TensorView> places, WeightsMemory& model) {
  if (!record_) return;
  take_back(places, model);
  finish(model);
}

/// Ends the swap: all weights are back.
void Swap::finish(WeightsMemory& model) {
  model.written();
  step_done();
  record_.reset();
}

/// Takes own parts back to `places`, which may have other addresses and streams than the record; empty: nothing has
/// moved.
void Swap::take_back(std::span<const TensorView> places, WeightsMemory& model) {
  if (!record_) return;
  const ConcurrentUseCheck::Use use(user_, "swap_out()");
  if (!places.empty()) {
    check_swappable(storage_.whole(), places);
    std::vector<TensorView> own = storage_.divide(places);
    check_dtypes(record_->weights, own, "swapped in");
    record_->weights.swap(own);
  }
  exchange_out();
  model.scatter();
}

RingSwap::Tensors Swap::through_ring() const {
  return {record_->weights, storage_.averages[record_->k], record_->kept};
}

void Swap::exchange_in() {
  for (const SwapStep& step : record_->steps) {
    step_done();
    const TensorView &weight = record_->weights[step.first], &average = storage_.averages[record_->k][step.first];
    if (step.ring) {
      ++record_->exchanged;  // from here on taking back is right: the ring's swap knows how far it came
      step.ring->in(through_ring(), *storage_.pool);
    } else if (is_other(weight)) {
      storage_.other->keep(weight);
      ++record_->exchanged;
      storage_.other->show(weight, record_->k);
    } else if (kernels::swaps_in_place(weight.dtype, storage_.options.dtype)) {
      exchange(step, Direction::kIn);
      ++record_->exchanged;
    } else {
      cast(weight, memory_as(weight, record_->kept[step.first]), *storage_.pool);
      ++record_->exchanged;  // from here on taking back is right, whether or not the next line was reached
      cast(average, weight, *storage_.pool);
    }
  }
  step_done();
}

void Swap::exchange_out() {
  for (; record_->exchanged > 0; --record_->exchanged) {
    step_done();
    const SwapStep& step = record_->steps[record_->exchanged - 1];
    const TensorView& weight = record_->weights[step.first];
    if (step.ring) {
      step.ring->out(through_ring(), *storage_.pool);
    } else if (is_other(weight)) {
      storage_.other->put_back(weight);
    } else if (kernels::swaps_in_place(weight.dtype, storage_.options.dtype)) {
      exchange(step, Direction::kOut);
    } else {
      cast(memory_as(weight, record_->kept[step.first]), weight, *storage_.pool);
    }
  }
  for (size_t i = 0; i < record_->kept.size(); ++i) {
    if (record_->kept[i].bytes() > 0) average::finish(record_->weights[i]);
  }
  if (storage_.other) storage_.other->forget();
}

void Swap::exchange(const SwapStep& step, Direction direction) {
  const auto of_step = [&](std::span<const TensorView> views) {
    return views.subspan(step.first, step.end - step.first);
  };
  average::swap(of_step(record_->weights), of_step(storage_.averages[record_->k]), direction, *storage_.pool);
}

}  // namespace shardow::average
