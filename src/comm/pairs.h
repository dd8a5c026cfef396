// Who sends to whom, and when: every rank is in one pair at a time.
#pragma once

#include <bit>

namespace shardow::comm {

/// Calls send(partner) and receive(partner) for every other rank. The lower rank of a pair sends first, so that nobody
/// waits in a circle.
template <class Send, class Receive>
void with_each_partner(int rank, int num_ranks, Send send, Receive receive) {
  const int rounded = static_cast<int>(std::bit_ceil(static_cast<unsigned>(num_ranks)));
  for (int k = 1; k < rounded; ++k) {
    const int partner = rank ^ k;
    if (partner >= num_ranks) continue;
    if (rank < partner) {
      send(partner);
      receive(partner);
    } else {
      receive(partner);
      send(partner);
    }
  }
}

}  // namespace shardow::comm
