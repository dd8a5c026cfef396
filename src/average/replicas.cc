#include "average/replicas.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "group/ranks.h"
#include "group/wire.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

constexpr size_t kMostBytes = size_t{32} << 20;  // of a message, which needs memory until all of it has arrived

}  // namespace

group::Fact updates_fact(int64_t updates) {
  return {"the number of updates of the averages", std::to_string(updates),
          "call update() on every rank after each step (not under `if rank == 0`), or load the last state on all of "
          "them"};
}

group::Facts swap_facts(size_t k, int64_t updates, std::span<const TensorView> views) {
  group::Facts facts = {{"the average that is swapped in", std::to_string(k)}, updates_fact(updates)};
  std::string regions;
  for (const TensorView& view : views) {
    regions += view.region.encode();
    facts.push_back({fmt::format("view {}", facts.size() - 2),
                     fmt::format("'{}', {} of {}", view.name, dtype_name(view.dtype), view.region.to_string()),
                     "give all of AverageOptions.replicas the same views in the same order"});
  }
  facts.push_back({"a digest of all regions", std::to_string(group::digest(regions))});
  return facts;
}

Owned owned(const Region& region, std::span<const ReplicaLevel> levels) {
  Owned left{region, 0};
  for (const auto& [index, count] : levels) {
    const Region part = left.region.part(index, count);  // before the others are counted: it checks the index
    for (int before = 0; before < index; ++before) left.begin += left.region.part(before, count).size();
    left.region = part;
  }
  return left;
}

std::vector<TensorView> parts_of(std::span<const TensorView> views, int index, int count) {
  const ReplicaLevel level[] = {{index, count}};
  std::vector<TensorView> parts(views.begin(), views.end());
  for (TensorView& view : parts) {
    const auto [region, begin] = owned(view.region, level);
    view.data = data_at(view, begin);
    view.region = region;
  }
  return parts;
}

/// Packs small parts into one message, since a collective's latency is the time of a hundred of them.
ReplicaExchange::ReplicaExchange(const Group& replicas, std::span<const TensorView> views) {
  size_t most = 0;
  for (int owner = 0; owner < replicas.size(); ++owner) {
    for (const TensorView& part : parts_of(views, owner, replicas.size())) {
      const std::span memory(static_cast<std::byte*>(part.data),
                             static_cast<size_t>(byte_size(part.dtype, part.region.size())));
      for (size_t begin = 0, end = 0; begin < memory.size(); begin = end) {
        if (messages_.empty() || messages_.back().owner != owner || messages_.back().bytes == kMostBytes)
          messages_.push_back({owner});
        Message& message = messages_.back();
        end = std::min(memory.size(), begin + kMostBytes - message.bytes);
        message.pieces.push_back(memory.subspan(begin, end - begin));
        message.bytes += end - begin;
        most = std::max(most, message.bytes);
      }
    }
  }
  packed_.resize(most);
}

void ReplicaExchange::run(Group& replicas, Deadline deadline) {
  for (const auto& [owner, bytes, pieces] : messages_) {
    const std::span<std::byte> packed = std::span(packed_).first(bytes);
    const bool sends = owner == replicas.rank();
    if (!sends) group::ranks_of(replicas).broadcast(packed, owner, deadline);
    std::byte* at = packed.data();
    for (const std::span<std::byte> piece : pieces) {
      std::memcpy(sends ? at : piece.data(), sends ? piece.data() : at, piece.size());
      at += piece.size();
    }
    if (sends) group::ranks_of(replicas).broadcast(packed, owner, deadline);
  }
}

}  // namespace shardow::average
