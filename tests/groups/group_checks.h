// The checks that every Group must pass.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardow/group.h"

namespace shardow {

struct GroupCheck {
  std::string name;
  std::function<std::vector<std::string>(Group& group)> run;  ///< returns what is wrong; empty: nothing
};

/// Returns all checks. All ranks run each at once; try 1, 2, 3 and 8.
std::vector<GroupCheck> group_checks();

}  // namespace shardow
