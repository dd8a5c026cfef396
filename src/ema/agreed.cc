// The state of an Average as all its ranks have it: what must be equal is compared, what each rank counts for itself is
// summed. One small message from each rank; all that they have to say only where it is not the same.
#include "ema/agreed.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "average/counters.h"
#include "base/errors.h"
#include "comm/digest.h"
#include "comm/wire.h"
#include "shardow/ema_file.h"

namespace shardow {
namespace ema {
namespace {

using average::State;
using base::fail;
using comm::Receiver;
using comm::Sender;

struct Said {
  std::string state;  // empty: facts alone
  Facts facts;
};

Said unpack(std::string_view bytes) {
  Receiver in(bytes);
  Said said{in.text(), {}};
  while (!in.done()) {
    std::string name = in.text();
    said.facts.emplace_back(std::move(name), in.text());
  }
  return said;
}

struct Difference {
  std::string name, first, other;
};

std::string readable(const std::string& name, const std::string& text) {
  return name.starts_with("schedule") && text.starts_with('{') ? Schedule::from_json(text).key() : text;
}

std::optional<Difference> difference(const Said& first, const Said& other) {
  for (size_t i = 0; i < std::min(first.facts.size(), other.facts.size()); ++i) {
    const auto& [name, value] = first.facts[i];
    const auto& [other_name, other_value] = other.facts[i];
    if (name != other_name) return Difference{"what was asked for", name, other_name};
    if (value != other_value) return Difference{name, value, other_value};
  }
  if (first.state.empty()) return std::nullopt;
  const State zero = average::state_from_json(first.state), here = average::state_from_json(other.state);
  for (const OptionDifference& one : average::differences(zero.options, here.options))
    return Difference{one.name, readable(one.name, one.file), readable(one.name, one.own)};
  const average::Counters &a = zero.counters, &b = here.counters;
  if (a.step != b.step) return Difference{"step", std::to_string(a.step), std::to_string(b.step)};
  if (a.applied_step != b.applied_step)
    return Difference{"applied_step", std::to_string(a.applied_step), std::to_string(b.applied_step)};
  if (a.applied_samples != b.applied_samples)
    return Difference{"applied_samples", fmt::format("{}", a.applied_samples), fmt::format("{}", b.applied_samples)};
  return std::nullopt;
}

void check_updates(std::string_view call, const std::vector<int64_t>& updates) {
  const auto [least, most] = std::minmax_element(updates.begin(), updates.end());
  if (*least == *most) return;
  fail(Code::kInvalidArgument,
       "{}: some ranks have made {} updates of their parts of the averages, others {}; call update() on every rank "
       "after each step (not "
       "under `if rank == 0`), or load the last state on all of them",
       call, *least, *most);
}

}  // namespace

std::string said(const Facts& facts, const std::string& state) {
  Sender out;
  out.text(state);
  for (const auto& [name, value] : facts) {
    out.text(name);
    out.text(value);
  }
  return out.bytes();
}

void check_same(std::string_view call, const std::vector<std::string>& everybody) {
  for (size_t rank = 1; rank < everybody.size(); ++rank) {
    if (everybody[rank] == everybody[0]) continue;
    const auto found = difference(unpack(everybody[0]), unpack(everybody[rank]));
    if (!found)
      fail(Code::kInternal, "{}: rank {} says something else than rank 0, in nothing that has a name", call, rank);
    fail(Code::kInvalidArgument, "{}: ranks disagree. {} is {} on rank 0 and {} on rank {}", call, found->name,
         found->first, found->other, rank);
  }
}

std::string agreed_state(Group& group, std::string_view call, const std::string& own, const Facts& facts,
                         Deadline deadline) {
  if (group.size() == 1) return own;
  State state = average::state_from_json(own);
  const int64_t held = std::exchange(state.counters.held_non_finite, 0);
  const std::string mine = said(facts, average::to_json(state.options, state.counters));
  Sender out;
  out.number(state.counters.updates);
  out.number(held);
  out.number(static_cast<int64_t>(comm::digest(mine)));
  const auto sum_up = [&](const std::vector<std::string>& everybody) {
    std::vector<int64_t> updates;
    std::set<int64_t> digests;
    int64_t held_by_all = 0;
    for (const std::string& one : everybody) {
      Receiver in(one);
      updates.push_back(in.number());
      held_by_all += in.number();
      digests.insert(in.number());
    }
    check_updates(call, updates);
    Sender all;
    all.number(held_by_all);
    all.number(digests.size() == 1 ? 1 : 0);
    return Group::Decision{all.bytes()};
  };
  const std::string all = group.decide(out.bytes(), sum_up, deadline).common;
  Receiver in(all);
  state.counters.held_non_finite = in.number();
  if (in.number() == 0) check_same(call, group.all_gather(mine, deadline));  // on every rank: not all digests are equal
  return average::to_json(state.options, state.counters);
}

std::string own_part(const std::string& state, int rank) {
  if (rank == 0) return state;
  State part = average::state_from_json(state);
  part.counters.held_non_finite = 0;
  return average::to_json(part.options, part.counters);
}

}  // namespace ema

}  // namespace shardow
