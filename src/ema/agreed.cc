// The state of an Average as all its ranks have it: what must be equal is compared, what each rank counts for itself is
// summed. One small message from each rank; all that they have to say only where it is not the same.
//
// Values by checksums, joined: who has the same keys (names and regions) must have the same sums. All that a rank holds
// whole is one such set, and all that it holds a part of is another.
#include "ema/agreed.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "average/counters.h"
#include "base/errors.h"
#include "comm/wire.h"
#include "file/crc.h"
#include "shardow/ema_file.h"
#include "tensor/dtype.h"

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

bool is_whole(const Region& region) {
  return region == Region::whole(region.shape());
}

uint32_t checksum(const TensorView& view) {
  const auto bytes = static_cast<size_t>(byte_size(view.dtype, view.region.size()));
  return file::crc32(0, {static_cast<const std::byte*>(view.data), bytes});
}

/// (digest of the keys, digest of the sums) of a list of both.
std::pair<int64_t, int64_t> digests(std::string_view list) {
  std::string keys;
  Sender sums;
  for (Receiver in(list); !in.done();) {
    keys += in.text() + in.text();
    sums.number(in.number());
  }
  return {static_cast<int64_t>(comm::digest(keys)), static_cast<int64_t>(comm::digest(sums.bytes()))};
}

struct First {
  size_t rank;
  int64_t sum;
};

/// Throws for the first copies that differ.
Group::Decision differing(const std::vector<std::string>& by_rank) {
  std::map<std::pair<std::string, std::string>, First> first;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (Receiver in(by_rank[rank]); !in.done();) {
      std::string name = in.text(), region = in.text();
      const int64_t sum = in.number();
      const auto [found, is_new] = first.try_emplace({std::move(name), std::move(region)}, First{rank, sum});
      if (is_new || found->second.sum == sum) continue;
      base::fail(Code::kInvalidArgument,
                 "save(): the average of '{}' has other values on rank {} than on rank {}, and a file takes one rank's "
                 "for all: begin with "
                 "the same weights on all ranks that hold the same, and give them the same steps",
                 found->first.first, found->second.rank, rank);
    }
  }
  return {};
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

void check_same(std::string_view call, const std::vector<std::string>& by_rank) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] == by_rank[0]) continue;
    const auto found = difference(unpack(by_rank[0]), unpack(by_rank[rank]));
    if (!found)
      fail(Code::kInternal, "{}: rank {} says something else than rank 0, in nothing that has a name", call, rank);
    fail(Code::kInvalidArgument, "{}: ranks disagree. {} is {} on rank 0 and {} on rank {}", call, found->name,
         found->first, found->other, rank);
  }
}

StateWords::StateWords(std::string_view call, const std::string& own, const Facts& facts)
    : call_(call), state_(average::state_from_json(own)) {
  const int64_t held = std::exchange(state_.counters.held_non_finite, 0);
  all_ = said(facts, average::to_json(state_.options, state_.counters));
  Sender out;
  out.number(state_.counters.updates);
  out.number(held);
  out.number(static_cast<int64_t>(comm::digest(all_)));
  words_ = out.bytes();
}

std::string StateWords::sum_up(const std::vector<std::string>& by_rank) const {
  std::vector<int64_t> updates;
  std::set<int64_t> digests;
  int64_t held = 0;
  for (const std::string& words : by_rank) {
    Receiver in(words);
    updates.push_back(in.number());
    held += in.number();
    digests.insert(in.number());
  }
  check_updates(call_, updates);
  Sender out;
  out.number(held);
  out.number(digests.size() == 1 ? 1 : 0);
  return out.bytes();
}

std::string StateWords::state_of_all(Group& group, std::string_view sum, Deadline deadline) {
  Receiver in(sum);
  state_.counters.held_non_finite = in.number();
  if (in.number() == 0) {  // not all digests are equal
    const auto compare = [this](const std::vector<std::string>& words) {
      check_same(call_, words);
      return Group::Decision{};
    };
    group.decide(all_, compare, deadline);
  }
  return average::to_json(state_.options, state_.counters);
}

std::string own_part(const std::string& state, int rank) {
  if (rank == 0) return state;
  State part = average::state_from_json(state);
  part.counters.held_non_finite = 0;
  return average::to_json(part.options, part.counters);
}

Copies::Copies(std::span<const SaveFile> files) {
  Sender whole, rest;
  for (const SaveFile& file : files) {
    for (const TensorView& view : file.tensors) {
      if (view.device.kind != Device::Kind::kCpu) continue;
      Sender& to = is_whole(view.region) ? whole : rest;
      to.text(view.name);
      to.text(file.name + view.region.encode());
      to.number(checksum(view));
    }
  }
  whole_ = whole.bytes();
  rest_ = rest.bytes();
}

std::string Copies::words() const {
  Sender out;
  for (const std::string& list : {whole_, rest_}) {
    const auto [keys, sums] = digests(list);
    out.number(keys);
    out.number(sums);
  }
  return out.bytes();
}

std::string Copies::sum_up(const std::vector<std::string>& by_rank) {
  std::map<int64_t, int64_t> sums;
  bool same = true;
  for (const std::string& words : by_rank) {
    for (Receiver in(words); !in.done();) {
      const int64_t key = in.number(), sum = in.number();
      same = same && sums.try_emplace(key, sum).first->second == sum;
    }
  }
  return same ? "" : "other values";
}

void Copies::refuse(Group& group, Deadline deadline) const {
  group.decide(whole_ + rest_, differing, deadline);
  fail(Code::kInternal, "save(): sums of copies differ, and no copy does");
}

}  // namespace ema

}  // namespace shardow
