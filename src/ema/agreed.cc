#include "ema/agreed.h"

#include "average/clock.h"
#include "average/replicas.h"
#include "file/crc.h"
#include "group/wire.h"
#include "tensor/dtype.h"

namespace shardow::ema {
namespace {

using average::Clock;
using group::Facts;
using group::Receiver;

Facts facts_of(const Clock& clock, const Facts& asked) {
  const average::Counters& counters = clock.counters;
  Facts facts = {average::updates_fact(counters.updates)};
  facts.insert(facts.end(), asked.begin(), asked.end());
  for (const auto& [name, text] : average::named(clock.options)) facts.push_back({name, text});
  facts.push_back({"step", std::to_string(counters.step)});
  facts.push_back({"applied_step", std::to_string(counters.applied_step)});
  facts.push_back({"applied_samples", fmt::format("{}", counters.applied_samples)});
  return facts;
}

}  // namespace

std::string EqualStates::words() {
  const Clock clock = average::clock_from_json(state_);
  facts_.emplace(call_, facts_of(clock, asked_));
  return group::numbers_and_text({clock.counters.held_non_finite}, facts_->words());
}

std::string EqualStates::sum_up(const std::vector<std::string>& by_rank) const {
  int64_t held = 0;
  std::vector<std::string> facts;
  for (const std::string& words : by_rank) {
    if (words.empty()) return "";
    Receiver in(words);
    held += in.number();
    facts.push_back(in.text());
  }
  return group::numbers_and_text({held}, facts_->sum_up(facts));
}

void EqualStates::take(group::CollectiveCall& call, const std::string& total) {
  if (total.empty()) return;
  Receiver in(total);
  Clock clock = average::clock_from_json(state_);
  clock.counters.held_non_finite = in.number();
  facts_->take(call, in.text());
  state_ = clock.to_json();
}

std::string own_part(const std::string& state, int rank) {
  if (rank == 0) return state;
  Clock part = average::clock_from_json(state);
  part.counters.held_non_finite = 0;
  return part.to_json();
}

Facts copies_in(std::span<const SaveFile> files) {
  constexpr const char* kWayOut =
      "a file takes one rank's for all: begin with the same weights on all ranks that hold the same, and give them the "
      "same steps";
  Facts copies;
  for (const SaveFile& file : files) {
    for (const TensorView& view : file.tensors) {
      if (view.device.kind != Device::Kind::kCpu) continue;
      const auto bytes = static_cast<size_t>(byte_size(view.dtype, view.region.size()));
      const uint32_t sum = file::crc32(0, {static_cast<const std::byte*>(view.data), bytes});
      copies.push_back({fmt::format("'{}'{}{}{}", view.name, '\0', file.name, view.region.encode()),
                        std::to_string(sum), kWayOut,
                        view.region == Region::whole(view.region.shape()) ? "whole" : "parts"});
    }
  }
  return copies;
}

}  // namespace shardow::ema
