// The judge of a Group of one's own: what every Group must do, check by check.
//
//   for (const shardow::GroupCheck& check : shardow::group_checks()) {
//     for (const std::string& wrong : check.run(group)) std::cerr << check.name << ": " << wrong << '\n';
//   }
//
// Every rank runs all checks, in this order, with its own Group, all ranks at once: threads, or processes under a launcher. They work for
// any number of ranks; 1, 2, 3 and 8 have found everything so far. A check leaves the group in step for the next one, as long as nothing is
// wrong. Some let a deadline of 100 ms pass on purpose; what hangs ends after two minutes, if the group keeps its deadlines.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

struct GroupCheck {
  std::string name;  ///< what is checked, as one word: "all_gather_is_indexed_by_rank"

  /// What is wrong on this rank, in sentences; none: nothing. Throws nothing of the group's. Checks that need blocks find nothing where
  /// Group::moves_blocks() is false.
  std::function<std::vector<std::string>(Group& group)> run;
};

/// Of the six calls and their deadlines, then of agree() over them.
std::vector<GroupCheck> group_checks();

}  // namespace shardow
#pragma GCC visibility pop
