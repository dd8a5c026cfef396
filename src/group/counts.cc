#include "group/counts.h"

#include <vector>

#include "group/ranks.h"

namespace shardow::group {
namespace {

void join(std::span<uint64_t> numbers, std::span<const uint64_t> more, Op op) {
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = op == Op::kXor ? numbers[i] ^ more[i] : numbers[i] + more[i];
}

}  // namespace

void join_on_first(Group& group, std::span<const Counts> counts, Deadline deadline) {
  Ranks& ranks = ranks_of(group);
  for (const auto& [numbers, op] : counts) {
    if (numbers.empty()) continue;
    std::vector<uint64_t> received(numbers.size());
    for (const int below : {2 * group.rank() + 1, 2 * group.rank() + 2}) {
      if (below >= group.size()) continue;
      ranks.recv(std::as_writable_bytes(std::span(received)), below, deadline);
      join(numbers, received, op);
    }
    if (group.rank() > 0) ranks.send(std::as_bytes(numbers), (group.rank() - 1) / 2, deadline);
  }
}

}  // namespace shardow::group
