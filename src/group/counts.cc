#include "group/counts.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "group/ranks.h"

namespace shardow::group {
namespace {

void join(std::span<uint64_t> numbers, std::span<const uint64_t> more, Op op) {
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = op == Op::kXor ? numbers[i] ^ more[i] : numbers[i] + more[i];
}

std::string words_of(std::span<const uint64_t> numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()};
}

}  // namespace

void join_by_rounds(Group& group, std::span<const Counts> counts, Deadline deadline) {
  constexpr size_t kMost = size_t{64} << 10;  // numbers of a round, of which one rank reads those of all
  if (ranks_of(group).moves_blocks()) return;
  for (const auto& [numbers, op] : counts) {
    for (size_t i = 0; i < numbers.size(); i += kMost) {
      const auto part = numbers.subspan(i, std::min(kMost, numbers.size() - i));
      const auto join_all = [&, op_of_all = op](const std::vector<std::string>& by_rank) {
        std::vector<uint64_t> all(part.size()), own(part.size());
        for (const std::string& words : by_rank) {
          std::memcpy(own.data(), words.data(), words.size());
          join(all, own, op_of_all);
        }
        return Ranks::Decision{words_of(all)};
      };
      const std::string all = ranks_of(group).decide(words_of(part), join_all, deadline).common;
      std::memcpy(part.data(), all.data(), all.size());
    }
  }
}

void join_by_blocks(Group& group, std::span<const Counts> counts, Deadline deadline) {
  Ranks& ranks = ranks_of(group);
  if (!ranks.moves_blocks()) return;
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
