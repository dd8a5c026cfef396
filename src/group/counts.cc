#include "group/counts.h"

#include <algorithm>
#include <vector>

namespace shardow::group {

void join_by_rounds(Group& group, std::span<const Counts> counts, Deadline deadline) {
  constexpr size_t kMost = size_t{64} << 10;  // numbers of a round, of which one rank reads those of all
  if (group.moves_blocks()) return;
  for (const auto& [numbers, op] : counts) {
    for (size_t i = 0; i < numbers.size(); i += kMost)
      group.all_reduce(numbers.subspan(i, std::min(kMost, numbers.size() - i)), op, deadline);
  }
}

void join_by_blocks(Group& group, std::span<const Counts> counts, Deadline deadline) {
  if (!group.moves_blocks()) return;
  for (const auto& [numbers, op] : counts) {
    if (numbers.empty()) continue;
    std::vector<uint64_t> received(numbers.size());
    for (const int below : {2 * group.rank() + 1, 2 * group.rank() + 2}) {
      if (below >= group.size()) continue;
      group.recv(std::as_writable_bytes(std::span(received)), below, deadline);
      for (size_t i = 0; i < numbers.size(); ++i)
        numbers[i] = op == Group::Op::kXor ? numbers[i] ^ received[i] : numbers[i] + received[i];
    }
    if (group.rank() > 0) group.send(std::as_bytes(numbers), (group.rank() - 1) / 2, deadline);
  }
}

}  // namespace shardow::group
